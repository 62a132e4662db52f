#ifndef THREADS_H
#define THREADS_H

/* Without OpenMP: one thread, and the pragmas mean nothing. */
#ifdef _OPENMP
#include <omp.h>
#else
static inline int omp_get_thread_num(void) { return 0; }
static inline int omp_get_num_threads(void) { return 1; }
static inline int omp_get_max_threads(void) { return 1; }
#endif

#endif
