"""The frame of pages to explore: one HTML file each, which needs no network and no server."""
