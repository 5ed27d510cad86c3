"""Parts of `profile`: the document, the measuring, the fit, the problem it makes."""
