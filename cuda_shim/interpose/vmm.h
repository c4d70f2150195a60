/* SPDX-License-Identifier: Apache-2.0 */
/* Physical memory that is mapped: what arrays and forked children need of vmm.c. */
#ifndef AQ_INTERPOSE_VMM_H
#define AQ_INTERPOSE_VMM_H

#include <stdint.h>

#include "cuda_abi.h"

/* Around the destruction of an array or mipmapped array: first take the records of the physical memory mapped to it, because its address
 * may be used again at once; then drop them, or put them back when the driver refused. */
struct aq_tile;
struct aq_tile *aq_vmm_array_ending(uint64_t array);
void aq_vmm_array_ended(uint64_t array, struct aq_tile *tiles, CUresult result);

/* In a forked child. */
void aq_vmm_forget(void);

#endif
