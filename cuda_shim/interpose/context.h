/* SPDX-License-Identifier: Apache-2.0 */
/* Where a call's memory counts: the device behind the calling thread's context, and what the memory dies with. */
#ifndef AQ_INTERPOSE_CONTEXT_H
#define AQ_INTERPOSE_CONTEXT_H

#include <stdbool.h>
#include <stdint.h>

#include "account/account.h"
#include "cuda_abi.h"
#include "interpose/device.h"

struct aq_place {
	int device;       /* position in the limits, or AQ_NO_DEVICE */
	CUdevice ordinal;
	uint64_t owner;   /* a context made by cuCtxCreate; 0 = the device's primary context */
};

/* The calling thread's place, for a call that takes memory. Else the error to return without that call: the driver's reply to the query, or
 * CUDA_ERROR_INVALID_CONTEXT where the thread has no context. What the shim could not place, it cannot charge. */
CUresult aq_find_place(struct aq_place *place);
/* The place of a stream: its context's, or the thread's for the default streams. */
CUresult aq_find_place_of_stream(CUstream stream, struct aq_place *place);
/* The same for callers that take no memory. */
bool aq_place_current(struct aq_place *place);
bool aq_place_of_stream(CUstream stream, struct aq_place *place);
/* Its device alone, for hot paths; AQ_NO_DEVICE when the device is not granted. Where the process has one device, this queries the driver
 * for the thread's context only once, and again after a context began or ended. */
int aq_device_of_stream(CUstream stream);

/* The context of a stream, the thread's for the default streams; NULL when there is no context. */
CUcontext aq_context_of_stream(CUstream stream);
/* Make a context current, unless it is. False when the driver refuses; else aq_context_leave has to follow, with what was learned. */
bool aq_context_enter(CUcontext context, bool *pushed);
void aq_context_leave(bool pushed);
/* Does the driver say that the thread has no context? */
bool aq_context_is_absent(void);
/* Two queries must say that it is gone: what is uncharged on an error alone may still be held. */
bool aq_context_is_alive(CUcontext context);

/* The device that pays for memory at a location; AQ_NO_ORDINAL for host memory. Managed memory can move to any device, so without a named
 * device the current one pays, and without a context the first. CUDA_ERROR_NOT_SUPPORTED for locations that this shim does not know: they
 * may be device memory. */
CUresult aq_place_of_location(const CUmemLocation *location, CUmemAllocationType type, CUdevice *ordinal);

/* A function is given out that needs so much local memory for each thread. The driver grows the current context's stacks when the function
 * is launched, for all threads that can be resident, and does not give that back. So it is charged now, where the call can be refused. */
CUresult aq_context_reserve_stack(const struct aq_place *place, uint64_t local_bytes);

/* In a forked child. */
void aq_contexts_forget(void);

#endif
