/* SPDX-License-Identifier: Apache-2.0 */
/*
 * runtime.h - what the parts of the simulated runtime share.
 *
 * Invariant: an exported call that fails stores its error for cudaGetLastError of its thread, because `<<<>>>` drops return values. So
 * every exported function returns by rt_return. Functions that start with rt_ are internal; they return errors and store nothing.
 *
 * Locks: `opening` (driver.c), the table's lock and each module's lock (registry.c), `retaining` (context.c). A thread holds at most a
 * module's lock and one of the others below it.
 */
#ifndef ALIQUOT_SIMULATED_RUNTIME_H
#define ALIQUOT_SIMULATED_RUNTIME_H

#include <stdbool.h>
#include <stddef.h>

#include "simulated_runtime/cudart_abi.h"

#define EXPORT __attribute__((visibility("default")))

/* ---- the driver (driver.c) ------------------------------------------------------------------------------------------- */

/* The driver's functions, each a member by its symbol; NULL where this driver has none. Valid after rt_start. */
struct driver {
#define DRIVER(symbol) __typeof__(&symbol) symbol;
#include "simulated_runtime/driver.def"
#undef DRIVER
};
extern struct driver cu;

extern const int rt_version;   /* 1000 * major + 10 * minor (version.c) */

/* Open the driver and start it, once; after a failure the next call tries again. */
cudaError_t rt_start(void);

/* ---- errors (error.c) ------------------------------------------------------------------------------------------------ */

cudaError_t rt_error(CUresult result);       /* the runtime's number of a driver's result */
cudaError_t rt_return(cudaError_t error);    /* keep it for cudaGetLastError */

/* Call a function of the driver that may be missing: the runtime's error. */
#define RT_CALL(symbol, ...) (cu.symbol ? rt_error(cu.symbol(__VA_ARGS__)) : cudaErrorCallRequiresNewerDriver)

/* Leave the calling function, which returns a cudaError_t, on an error. */
#define RT_TRY(call)                           \
	do {                                   \
		cudaError_t error_ = (call);   \
		if (error_ != cudaSuccess)     \
			return error_;         \
	} while (0)

/* ---- devices and contexts (context.c) -------------------------------------------------------------------------------- */

cudaError_t rt_context(void);                              /* start; a context is current afterwards */
cudaError_t rt_device(int *ordinal);                       /* of the current context, else of the thread */
cudaError_t rt_primary(int ordinal, CUcontext *context);   /* a device's primary context, retained once per process */

/* ---- registered code (registry.c) ------------------------------------------------------------------------------------ */

/* The kernel that a host function, or a handle given out before, stands for. Loads its binary. */
cudaError_t rt_kernel(const void *function, CUkernel *kernel);
/* Address and size of the variable behind a host variable, in the current context. Loads its binary. */
cudaError_t rt_symbol(const void *variable, CUdeviceptr *address, size_t *bytes);
/* Handles of kernels that a program found by itself. Any call that takes a host function takes them too. */
cudaError_t rt_remember_kernel(CUkernel kernel, CUlibrary library);
void rt_forget_kernels(CUlibrary library);

/* ---- copies (copy.c) ------------------------------------------------------------------------------------------------- */

/* What the source or the destination of a copy in this direction is. */
CUmemorytype rt_memory_type(int kind, bool source);

#endif
