package cohort

import (
	"errors"

	"github.com/agentzip/agentzip/internal/codec"
	"github.com/agentzip/agentzip/internal/fault"
	"github.com/agentzip/agentzip/internal/library"
	"github.com/agentzip/agentzip/internal/pool"
	"github.com/agentzip/agentzip/internal/units"
)

// corruptPoint damages what Load decoded.
var corruptPoint = fault.NewPoint("cohort.corrupt")

// Load fills dst with the page that r names and checks it. The caller holds a reference.
// A *Damage means that dst holds no page and that the sandbox which needs it cannot go on.
func (c *Cohort) Load(w *Worker, dst *units.Page, r Ref) error {
	if err := corruptPoint.Err(); err != nil {
		return &Damage{r, err}
	}
	if r.Public() {
		w.loaded = WayPublic
		return wrap(r, c.library.Read(dst, r.id()))
	}
	reader := w.reader(c)
	reader.Pin()
	defer reader.Unpin()
	return c.load(w, reader, dst, r)
}

// load decodes an entry, and its base. reader is pinned.
func (c *Cohort) load(w *Worker, reader *pool.Reader, dst *units.Page, r Ref) error {
	enc, err := view(reader, r.handle())
	if err != nil {
		return &Damage{r, err}
	}
	var base *units.Page
	if enc.Kind.HasBase() {
		if base, err = c.base(w, reader, Ref(enc.Operand)); err != nil {
			return err
		}
	}
	w.loaded = Way(enc.Kind)
	return describe(r, enc, w.decoder.Decode(dst, enc, base, c.dictionary(enc)))
}

// base returns a base page, decoded into w.base unless it can be had where it is.
func (c *Cohort) base(w *Worker, reader *pool.Reader, r Ref) (*units.Page, error) {
	if r.Public() {
		if p := c.library.Template(units.Frame(r.id())); p != nil {
			return p, nil
		}
		return &w.base, wrap(r, c.library.Read(&w.base, r.id()))
	}
	enc, err := view(reader, r.handle())
	if err != nil {
		return nil, &Damage{r, err}
	}
	if enc.Kind.HasBase() {
		return nil, &Damage{r, errChain}
	}
	return &w.base, describe(r, enc, w.decoder.Decode(&w.base, enc, nil, c.dictionary(enc)))
}

func (c *Cohort) dictionary(enc codec.Encoded) *codec.Dictionary {
	if id := enc.Dict(); id != 0 && c.dict != nil {
		return c.dict.Lookup(id)
	}
	return nil
}

// Way returns how a page is kept and the bytes of its entry, without header; 0 for a
// public page. The caller holds a reference, or bears an answer for another page.
func (c *Cohort) Way(w *Worker, r Ref) (Way, int, error) {
	if r.Public() {
		return WayPublic, 0, nil
	}
	reader := w.reader(c)
	reader.Pin()
	defer reader.Unpin()
	enc, err := view(reader, r.handle())
	return Way(enc.Kind), len(enc.Data), wrap(r, err)
}

// IsMissing reports whether damage is that of a public page that cannot be read or has
// changed on disk: the template is damaged, not the pool.
func IsMissing(err error) bool { return errors.Is(err, library.ErrDamaged) }
