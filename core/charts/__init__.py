"""Charts: described as plain data, and drawn by matplotlib as inline SVG or as files.

from rbtool.core.charts.figure import inline_svg
from rbtool.core.charts.figure import Histogram, ChartLabels

svg = inline_svg(Histogram(counts, edges, ChartLabels(title="Length", x="steps", y="episodes")))
"""
