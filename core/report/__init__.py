"""The report of datasets: the figures of their rows and episodes, and the page that shows them."""
