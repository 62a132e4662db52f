/* The products of this variant: `multiply` of the type's and the processor's order of sums, and what it asks for. */
#ifndef ORDER_H
#define ORDER_H

#include "real.h"

#ifndef REAL_IS_BFLOAT16
#include "product_float.h"
#elif defined(__AMX_BF16__) || defined(BFLOAT16_ORDER_BLOCKS)
#include "product_blocks.h"
#else
#include "product_dot.h"
#endif

#endif
