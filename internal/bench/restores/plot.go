package restores

import (
	"fmt"
	"image/color"
	"io"
	"slices"
	"time"

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"

	"github.com/agentzip/agentzip/internal/report"
)

// Colours of the curves, told apart also by those who see no red or no green.
var (
	blue   = color.RGBA{0x1f, 0x5f, 0xa8, 0xff}
	orange = color.RGBA{0xe6, 0x8a, 0x00, 0xff}
	green  = color.RGBA{0x2a, 0x8a, 0x5b, 0xff}
	grey   = color.RGBA{0x8a, 0x8a, 0x8a, 0xff}
)

// A curve is a distribution as the share of all that is slower than a time.
type curve struct {
	name  string
	color color.Color
	xys   plotter.XYs // milliseconds, share
}

// WritePlot draws the distributions as SVG.
func (r *Report) WritePlot(w io.Writer) error {
	canvas := vgsvg.New(plotWidth, plotHeight)
	if err := r.draw(draw.New(canvas)); err != nil {
		return err
	}
	if _, err := canvas.WriteTo(w); err != nil {
		return fmt.Errorf("write plot: %w", err)
	}
	return nil
}

// Size of the drawing.
const (
	plotWidth  = 900 * vg.Length(1)
	plotHeight = 340 * vg.Length(1)
)

// draw puts restores and faults on the left, the stall of calls on the right. Both show
// which share takes longer than a time, on logarithmic axes: the tail is what the figures are about.
func (r *Report) draw(page draw.Canvas) error {
	var faults []curve
	for _, x := range []struct {
		name, key string
		c         color.Color
	}{
		{"blocking restore", report.KindEvicted, blue},
		{"write to a protected page", report.KindProtected, orange},
		{"zero page", report.KindZero, grey},
		{"restored ahead, per page", report.KindPage, green},
	} {
		if c := survivors(r.Main.Latencies[x.key]); len(c) > 0 {
			faults = append(faults, curve{x.name, x.c, c})
		}
	}
	var stalls []time.Duration
	for _, run := range r.Main.Runs {
		for _, c := range run.Calls {
			if run.Mode == "on" {
				stalls = append(stalls, duration(c.StallMS))
			}
		}
	}
	left, err := panel("Which share of restores takes longer", "milliseconds", faults)
	if err != nil {
		return err
	}
	right, err := panel("Which share of tool calls waits longer", "milliseconds of stall per call", []curve{{"stall of a call", blue, slower(stalls)}})
	if err != nil {
		return err
	}
	half := page.Size().X / 2
	left.Draw(draw.Crop(page, 0, -half-vg.Points(8), 0, 0))
	right.Draw(draw.Crop(page, half+vg.Points(8), 0, 0, 0))
	return nil
}

// panel draws curves; without any it is empty.
func panel(title, x string, curves []curve) (*plot.Plot, error) {
	p := plot.New()
	p.Title.Text, p.X.Label.Text = title, x
	p.Add(plotter.NewGrid())
	for _, c := range curves {
		if len(c.xys) == 0 {
			continue
		}
		line, err := plotter.NewLine(c.xys)
		if err != nil {
			return nil, fmt.Errorf("draw %s: %w", c.name, err)
		}
		line.Color, line.Width = c.color, vg.Points(1.5)
		p.Add(line)
		p.Legend.Add(c.name, line)
	}
	p.Legend.Top = true
	if 0 < p.X.Min && p.X.Min < p.X.Max && 0 < p.Y.Min && p.Y.Min < p.Y.Max { // else a logarithm has no axis
		p.X.Scale, p.Y.Scale = plot.LogScale{}, plot.LogScale{}
		p.X.Tick.Marker, p.Y.Tick.Marker = plot.LogTicks{Prec: -1}, plot.LogTicks{Prec: -1}
	}
	return p, nil
}

// survivors is the curve of a histogram. Its end, where nothing is slower, cannot be drawn
// on a logarithmic axis.
func survivors(h report.Histogram) (xys plotter.XYs) {
	all, left := float64(h.Count()), h.Count()
	for _, b := range h.Buckets {
		if left -= b.Count; left > 0 && b.LE > 0 {
			xys = append(xys, plotter.XY{X: millis(b.LE), Y: float64(left) / all})
		}
	}
	return xys
}

// slower is the curve of exact durations. It sorts d.
func slower(d []time.Duration) (xys plotter.XYs) {
	slices.Sort(d)
	for i, x := range d {
		if left := len(d) - 1 - i; left > 0 && x > 0 {
			xys = append(xys, plotter.XY{X: millis(x), Y: float64(left) / float64(len(d))})
		}
	}
	return xys
}
