package main

import (
	"cmp"
	"encoding/json"
	"encoding/xml"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// figure is one SVG file: a row of panels with the same axes.
type figure struct {
	file, title string
	row         int
	panels      []panel
	width       float64 // of the plotting area of a panel, in pixels
}

// panel plots the results of its methods against the number of VIPs.
type panel struct{ title, what string }

// figures are drawn from the results of a run. A test checks that the documents show them.
var figures = []figure{
	{
		file: "one-flip.svg", title: "One of N VIPs changes → UPDATE at the gateway", row: 1,
		panels: []panel{{"", oneFlips}}, width: 660,
	},
	{
		file: "all-flip.svg", title: "All N VIPs change → last UPDATE at the gateway", row: 2,
		panels: []panel{{"all go down", allDown}, {"all come up", allUp}}, width: 330,
	},
}

// lineStyle is the style of a method. Colors have a contrast of more than 3:1 with white and
// with the dark background of GitHub; markers differ as well.
type lineStyle struct{ method, color, marker string }

var lineStyles = []lineStyle{
	{vipgate, "#1f7aec", "circle"},
	{reference, "#d9722b", "square"},
}

// Measures of a figure, in pixels.
const (
	inkColor     = "#6e7781" // text and axes: 4:1 with white and with GitHub's dark background
	plotHeight   = 300.0
	marginTop    = 64.0
	marginLeft   = 62.0
	marginRight  = 46.0 // for the values at the ends of the lines
	marginBottom = 46.0
	panelInset   = 14.0 // between the axes and the outermost values
	seriesShift  = 4.0  // between methods at the same N, so that their whiskers do not overlap
	labelHeight  = 13.0 // least distance between the values at the ends of the lines
)

// point is a method's median and 99th percentile with n VIPs.
type point struct {
	n           int
	median, p99 float64
}

// series are the points of a method in a panel, by n.
type series struct {
	lineStyle
	points []point
}

// loadReport reads the JSON of an earlier run.
func loadReport(path string) (*report, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("results: %w", err)
	}
	r := &report{}
	if err := json.Unmarshal(b, r); err != nil {
		return nil, fmt.Errorf("results in %s: %w", path, err)
	}
	return r, nil
}

// drawPlots writes the figures whose rows were measured into a folder, and returns their paths.
func (r *report) drawPlots(dir string) (drawn []string, err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, fmt.Errorf("plots: %w", err)
	}
	for _, f := range figures {
		text, err := f.draw(r)
		if err != nil {
			return drawn, err
		}
		if text == "" {
			continue
		}
		path := filepath.Join(dir, f.file)
		err = writeFile(path, func(w io.Writer) error { _, err := io.WriteString(w, text); return err })
		if err != nil {
			return drawn, err
		}
		drawn = append(drawn, path)
	}
	return drawn, nil
}

// plot draws the figures and names their files.
func (r *report) plot(dir string, w io.Writer) error {
	drawn, err := r.drawPlots(dir)
	for _, path := range drawn {
		fmt.Fprintln(w, "plot: "+path)
	}
	return err
}

// seriesOf returns the results of a panel's methods. Values without a logarithm are left out.
func (r *report) seriesOf(row int, what string) []series {
	var all []series
	for _, style := range lineStyles {
		s := series{lineStyle: style}
		for _, m := range r.Results {
			if m.Row == row && m.What == what && m.Method == style.method && m.N > 0 && m.Median > 0 {
				s.points = append(s.points, point{m.N, m.Median, m.P99})
			}
		}
		slices.SortFunc(s.points, func(a, b point) int { return cmp.Compare(a.n, b.n) })
		if len(s.points) > 0 {
			all = append(all, s)
		}
	}
	return all
}

// axes maps values to pixels of a panel, both by their logarithms.
type axes struct {
	left, width   float64
	firstN, lastN float64 // logarithms to base 10
	ticks         []int   // the numbers of VIPs
	least, most   float64 // of the time
}

// maxDecades bounds the values of an axis.
const maxDecades = 12

func newAxes(panels [][]series, width float64) axes {
	a := axes{width: width, firstN: math.Inf(1), lastN: math.Inf(-1), least: math.Inf(1)}
	for _, list := range panels {
		for _, s := range list {
			for _, p := range s.points {
				a.firstN, a.lastN = min(a.firstN, math.Log10(float64(p.n))), max(a.lastN, math.Log10(float64(p.n)))
				a.least, a.most = min(a.least, p.median), max(a.most, p.p99)
				a.ticks = append(a.ticks, p.n)
			}
		}
	}
	slices.Sort(a.ticks)
	a.ticks = slices.Compact(a.ticks)
	a.least, a.most = below(a.least), above(a.most)
	if a.least == a.most {
		a.most *= 10
	}
	return a
}

// below returns the largest of 1, 2 and 5 times a power of ten that is not above v.
func below(v float64) float64 {
	decade := math.Pow10(int(math.Floor(math.Log10(v))))
	for _, step := range []float64{5, 2} {
		if v >= step*decade {
			return step * decade
		}
	}
	return decade
}

// above returns the smallest of 1, 2 and 5 times a power of ten that is not below v.
func above(v float64) float64 {
	decade := math.Pow10(int(math.Floor(math.Log10(v))))
	for _, step := range []float64{1, 2, 5} {
		if v <= step*decade {
			return step * decade
		}
	}
	return 10 * decade
}

func (a axes) x(n int) float64 {
	if a.lastN == a.firstN {
		return a.left + a.width/2
	}
	share := (math.Log10(float64(n)) - a.firstN) / (a.lastN - a.firstN)
	return a.left + panelInset + share*(a.width-2*panelInset)
}

func (a axes) y(v float64) float64 {
	return marginTop + plotHeight*(1-math.Log10(v/a.least)/math.Log10(a.most/a.least))
}

// canvas collects the elements of an SVG.
type canvas struct{ strings.Builder }

func (c *canvas) add(format string, args ...any) { fmt.Fprintf(c, format+"\n", args...) }

func (c *canvas) text(x, y float64, anchor, attributes, text string) {
	c.add(`<text x="%.1f" y="%.1f" text-anchor="%s"%s>%s</text>`, x, y, anchor, attributes, escapeXML(text))
}

func escapeXML(s string) string {
	var b strings.Builder
	_ = xml.EscapeText(&b, []byte(s)) // a strings.Builder never fails
	return b.String()
}

// draw returns the SVG, or "" if the row was not measured. Equal results give equal bytes.
func (f figure) draw(r *report) (string, error) {
	var panels [][]series
	measured := false
	for _, p := range f.panels {
		list := r.seriesOf(f.row, p.what)
		measured = measured || len(list) > 0
		panels = append(panels, list)
	}
	if !measured {
		return "", nil
	}
	a := newAxes(panels, f.width)
	if math.Log10(a.most/a.least) > maxDecades {
		return "", fmt.Errorf("%s: values from %g to %g", f.file, a.least, a.most)
	}
	step := marginLeft + f.width + marginRight
	width, height := step*float64(len(f.panels)), marginTop+plotHeight+marginBottom
	var c canvas
	c.add(`<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 %.0f %.0f" width="%[1]g" height="%[2]g" role="img" `+
		`font-family="Helvetica, Arial, 'DejaVu Sans', sans-serif" font-size="11" fill="%s">`, width, height, inkColor)
	c.add(`<title>%s</title>`, escapeXML(f.title))
	c.text(marginLeft, 20, "start", ` font-size="14" font-weight="bold"`, f.title)
	c.legend(panels, marginLeft)
	for i, p := range f.panels {
		a.left = marginLeft + float64(i)*step
		c.text(a.left+f.width/2, marginTop-6, "middle", "", p.title)
		c.grid(a)
		shift := -seriesShift * float64(len(panels[i])-1) / 2
		for k, s := range panels[i] {
			c.line(a, s, shift+seriesShift*float64(k))
		}
		c.lastValues(a, panels[i])
	}
	c.add(`</svg>`)
	return c.String(), nil
}

// legend lists the methods that occur.
func (c *canvas) legend(panels [][]series, x float64) {
	const y = 40.0
	for _, style := range lineStyles {
		occurs := func(list []series) bool {
			return slices.ContainsFunc(list, func(s series) bool { return s.method == style.method })
		}
		if !slices.ContainsFunc(panels, occurs) {
			continue
		}
		c.add(`<path d="M%.1f %.1fh24" stroke="%s" stroke-width="2"/>`, x, y-4, style.color)
		c.marker(style, x+12, y-4)
		c.text(x+30, y, "start", "", style.method)
		x += 44 + 6.2*float64(len(style.method))
	}
	c.text(x, y, "start", "", "line: median, whisker: 99th percentile")
}

// grid draws the frame, the ticks and their values.
func (c *canvas) grid(a axes) {
	bottom := marginTop + plotHeight
	for exponent := int(math.Floor(math.Log10(a.least))); math.Pow10(exponent) <= a.most; exponent++ {
		for k := 1.0; k < 10; k++ {
			v := k * math.Pow10(exponent)
			if v < a.least || v > a.most {
				continue
			}
			if k == 1 {
				c.add(`<path d="M%.1f %.1fh%.1f" stroke="%s" stroke-opacity="0.35"/>`, a.left, a.y(v), a.width, inkColor)
			} else {
				c.add(`<path d="M%.1f %.1fh4" stroke="%s"/>`, a.left, a.y(v), inkColor)
			}
			if k == 1 || v == a.least || v == a.most {
				c.text(a.left-6, a.y(v)+4, "end", "", axisValue(v))
			}
		}
	}
	for _, n := range a.ticks {
		c.add(`<path d="M%.1f %.1fv-5" stroke="%s"/>`, a.x(n), bottom, inkColor)
		c.text(a.x(n), bottom+16, "middle", "", grouped(n))
	}
	c.add(`<rect x="%.1f" y="%.1f" width="%.1f" height="%.1f" fill="none" stroke="%s"/>`, a.left, marginTop, a.width,
		plotHeight, inkColor)
	c.text(a.left+a.width/2, bottom+34, "middle", "", "N, VIPs")
	c.add(`<text transform="translate(%.1f %.1f) rotate(-90)" text-anchor="middle">ms</text>`, a.left-46,
		marginTop+plotHeight/2)
}

// axisValue writes a bound or a power of ten.
func axisValue(v float64) string {
	if v >= 1000 {
		return grouped(int(math.Round(v)))
	}
	return strconv.FormatFloat(v, 'g', 3, 64)
}

// grouped writes a number with a space before each three digits.
func grouped(n int) string {
	digits := strconv.Itoa(n)
	for i := len(digits) - 3; i > 0; i -= 3 {
		digits = digits[:i] + " " + digits[i:]
	}
	return digits
}

// line draws a method: a line through the medians, and up to the 99th percentile of each a whisker.
func (c *canvas) line(a axes, s series, shift float64) {
	var path strings.Builder
	for i, p := range s.points {
		command := "L"
		if i == 0 {
			command = "M"
		}
		fmt.Fprintf(&path, "%s%.1f %.1f", command, a.x(p.n)+shift, a.y(p.median))
	}
	c.add(`<path d="%s" fill="none" stroke="%s" stroke-width="2"/>`, path.String(), s.color)
	for _, p := range s.points {
		x := a.x(p.n) + shift
		c.add(`<path d="M%.1f %.1fV%.1fm-3 0h6" fill="none" stroke="%s" stroke-opacity="0.7"/>`, x, a.y(p.median),
			a.y(p.p99), s.color)
		c.marker(s.lineStyle, x, a.y(p.median))
	}
}

// marker draws the mark of a method.
func (c *canvas) marker(s lineStyle, x, y float64) {
	switch s.marker {
	case "square":
		c.add(`<rect x="%.1f" y="%.1f" width="7" height="7" fill="%s"/>`, x-3.5, y-3.5, s.color)
	case "triangle":
		c.add(`<path d="M%.1f %.1fl4.5 8h-9z" fill="%s"/>`, x, y-5, s.color)
	default:
		c.add(`<circle cx="%.1f" cy="%.1f" r="4" fill="%s"/>`, x, y, s.color)
	}
}

// lastValues writes the last median of each method to the right of the panel, from the top down.
func (c *canvas) lastValues(a axes, list []series) {
	type label struct {
		y           float64
		text, color string
	}
	var labels []label
	for _, s := range list {
		last := s.points[len(s.points)-1]
		labels = append(labels, label{a.y(last.median), number(last.median), s.color})
	}
	slices.SortFunc(labels, func(a, b label) int { return cmp.Compare(a.y, b.y) })
	above := math.Inf(-1)
	for _, l := range labels {
		y := max(l.y, above+labelHeight)
		c.text(a.left+a.width+6, y+4, "start", fmt.Sprintf(` fill="%s"`, l.color), l.text)
		above = y
	}
}
