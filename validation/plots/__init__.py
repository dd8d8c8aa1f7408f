"""Pictures: matplotlib figures as SVG text in a page's colours (figure), and numbers as text (texts)."""
