"""Reports on datasets: figures of their rows and episodes, charts, and the HTML page that shows them."""
