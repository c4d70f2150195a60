/* SPDX-License-Identifier: Apache-2.0 */
/* The real CUDA driver: every entry point that we wrap or call, found once. */
#ifndef AQ_INTERPOSE_DRIVER_H
#define AQ_INTERPOSE_DRIVER_H

#include <stdbool.h>

#include "cuda_abi.h"
#include "interpose/object.h"

#define AQ_CUDA_SONAME "libcuda.so.1"
#define AQ_CUDA_DRIVER_NAME "libcuda.aliquot-driver.so.1"

struct aq_cuda_driver {
#define HOOK(symbol, base, since, flavour) __typeof__(&symbol) symbol;
#define USE(symbol) __typeof__(&symbol) symbol;
#include "interpose/hooks.def"
#include "interpose/driver_calls.def"
#undef HOOK
#undef USE
};

/* A call that the driver lacks returns CUDA_ERROR_NOT_SUPPORTED. All entries do until aq_cuda_bind has found a driver. */
extern struct aq_cuda_driver aq_cuda;

/* Find the driver among the loaded objects, once. False when no driver is loaded. */
bool aq_cuda_bind(void);
/* Take this object for the driver, unless one was found before. */
void aq_cuda_bind_to(const struct aq_object *object);
/* Is this an address of the driver, and not the substitute for a call that the driver lacks? */
bool aq_cuda_has(const void *real);

#endif
