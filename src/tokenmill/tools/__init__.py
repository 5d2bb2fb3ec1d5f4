"""The tools of the command line besides `tokenize` and `export`: a file or a folder each, named after its command."""
