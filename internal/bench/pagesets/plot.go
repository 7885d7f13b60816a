package pagesets

import (
	"errors"
	"fmt"
	"image/color"
	"io"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
)

// colours of the bars: what others do, and the product.
var (
	grey = color.RGBA{0x9a, 0x9a, 0x9a, 0xff}
	blue = color.RGBA{0x1f, 0x5f, 0xa8, 0xff}
)

// WritePlot draws what each row keeps, in per cent of the private pages, as SVG.
func (r *Report) WritePlot(w io.Writer) error {
	p := plot.New()
	p.Title.Text = fmt.Sprintf("Kept of the private pages of %d siblings, all overheads counted", r.most())
	p.Y.Label.Text = "% of private pages"
	p.Y.Min = 0
	var others, ours plotter.Values
	var names []string
	for _, x := range r.Results {
		if x.Siblings != r.most() {
			continue
		}
		kept := 100 * (1 - x.Saved)
		names = append(names, x.Row)
		if x.Row == RowAll {
			others, ours = append(others, 0), append(ours, kept)
		} else {
			others, ours = append(others, kept), append(ours, 0)
		}
	}
	if len(names) == 0 {
		return errors.New("draw plot: no row was measured")
	}
	for _, bars := range []struct {
		v plotter.Values
		c color.Color
	}{{others, grey}, {ours, blue}} {
		b, err := plotter.NewBarChart(bars.v, vg.Points(18))
		if err != nil {
			return fmt.Errorf("draw plot: %w", err)
		}
		b.Color, b.LineStyle.Width = bars.c, 0
		p.Add(b)
	}
	p.NominalX(names...)
	p.X.Tick.Label.Rotation = 0.9
	p.X.Tick.Label.XAlign, p.X.Tick.Label.YAlign = -1, -0.5
	p.Add(plotter.NewGrid())
	c, err := p.WriterTo(vg.Points(float64(60+32*len(names))), vg.Points(320), "svg")
	if err != nil {
		return fmt.Errorf("draw plot: %w", err)
	}
	if _, err := c.WriteTo(w); err != nil {
		return fmt.Errorf("write plot: %w", err)
	}
	return nil
}
