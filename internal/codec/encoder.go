package codec

import "github.com/agentzip/agentzip/internal/units"

// Options of an Encoder. The zero value is ready for use.
type Options struct {
	// Limit is the longest Data worth keeping, in bytes.
	Limit int
}

// Encoder encodes pages. One goroutine at a time.
type Encoder struct{}

// NewEncoder returns an Encoder.
func NewEncoder(o Options) *Encoder { return &Encoder{} }

// Encode encodes page. template is the template's page of the same frame, nil
// for a hole; dict may be nil. false: the page does not shrink below the
// limit and stays resident. Data is valid until the next Encode.
func (e *Encoder) Encode(page, template *units.Page, dict *Dictionary) (Encoded, bool) {
	return Encoded{}, false
}

// Close frees the native memory of e.
func (e *Encoder) Close() {}

// Decoder decodes pages. One goroutine at a time.
type Decoder struct{}

// NewDecoder returns a Decoder.
func NewDecoder() *Decoder { return &Decoder{} }

// Decode writes the page that enc encodes to dst and checks its checksum.
// template and dict are what Encode was given. It never panics, never writes
// outside dst and does not allocate, whatever enc holds.
func (d *Decoder) Decode(dst *units.Page, enc Encoded, template *units.Page, dict *Dictionary) error {
	return ErrCorrupt
}

// Close frees the native memory of d.
func (d *Decoder) Close() {}

// Dictionary is a trained Zstandard dictionary, ready for use by any number of
// encoders and decoders.
type Dictionary struct {
	id   DictID
	size units.Bytes
}

// NewDictionary prepares raw (the ZDICT format) for use. It copies raw.
func NewDictionary(id DictID, raw []byte) (*Dictionary, error) { return nil, ErrDictionary }

// ID returns the name given at construction.
func (d *Dictionary) ID() DictID { return d.id }

// Size returns all native memory held because of d, tables included.
func (d *Dictionary) Size() units.Bytes { return d.size }

// Close frees the native memory once the calls that are using it have
// returned. Later calls treat d as missing.
func (d *Dictionary) Close() {}
