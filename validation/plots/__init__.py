"""Plots of a page: what to draw as plain values (marks, charts), and one module that draws it (canvas, matplotlib)."""
