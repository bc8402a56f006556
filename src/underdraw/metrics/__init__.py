"""Quality of generated images: identical or not, one distribution or two, FID, CLIP and other scores."""
