"""Reports on datasets: figures of their rows and episodes, and the HTML page that shows them."""
