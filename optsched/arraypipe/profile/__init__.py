"""What blocks take: measuring, the document, the problem it makes."""
