"""Charts: what to draw as plain data, drawn by matplotlib as inline SVG text or as a file; the one place that draws.

from rbtool.core.charts.figure import inline_svg
from rbtool.core.charts.marks import Histogram, ChartLabels

svg = inline_svg(Histogram(counts, edges, ChartLabels(title="Length", x="steps", y="episodes")))
"""
