"""`explain`: how the backend would compile a model, as text and as a page."""
