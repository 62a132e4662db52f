/* All kernels as one translation unit: compiled once for each level of processor and type of numbers (library.py). */
#include "decoder_layer.c"
#include "experts.c"
#include "latent.c"
#include "one_thread.h"
