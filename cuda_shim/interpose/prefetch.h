/* SPDX-License-Identifier: Apache-2.0 */
/* Bringing memory back to a device when a container's time slot begins: in one piece over the bus, not page by page as kernels fault. */
#ifndef AQ_INTERPOSE_PREFETCH_H
#define AQ_INTERPOSE_PREFETCH_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"
#include "interpose/context.h"

/* Ask the driver to move this process's virtual memory of the device there, in the order of the stream, `room_bytes` of it at most. Memory
 * that the program itself wants elsewhere stays; small blocks are left to faults. What fails costs time alone. */
void aq_prefetch(const struct aq_place *place, CUstream stream, bool per_thread, uint64_t room_bytes);

#endif
