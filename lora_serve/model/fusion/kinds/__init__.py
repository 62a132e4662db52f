"""The kinds of layers with a fused replacement. The folder is the list: a new kind is a new file, named nowhere else.

A file of this folder has
    STAGE                         1; 2 for a kind that is made of parts which stage 1 has fused, and only adds up
    could_be(module)              True if a module looks like this kind
    candidates(module, parts)     replacements to try; the first that proves equal takes the module's place
"""
