/* SPDX-License-Identifier: Apache-2.0 */
/* The hook tables as data, expanded from hooks.def and nvml_hooks.def. */
#ifndef AQ_INTERPOSE_HOOKS_H
#define AQ_INTERPOSE_HOOKS_H

#include <stddef.h>

enum aq_flavour { AQ_LEGACY, AQ_PER_THREAD };

/* A name that a program passes to cuGetProcAddress, and the wrapper it gets. A wrapper has one row for each such name. */
struct aq_hook {
	const char *symbol;
	const char *base;        /* NULL for NVML, which has no cuGetProcAddress */
	int since;
	enum aq_flavour flavour;
	void *wrapper;
	void **real;             /* where the driver's own address is kept; NULL when the wrapper never calls it */
};

extern const struct aq_hook aq_cuda_hooks[];
extern const size_t aq_cuda_hook_count;
extern const struct aq_hook aq_nvml_hooks[];
extern const size_t aq_nvml_hook_count;

#endif
