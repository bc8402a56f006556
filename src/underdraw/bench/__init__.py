"""Measuring: benchmarks of methods against plain autoregression, quality of folders of images, figures, reports."""
