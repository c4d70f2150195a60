/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/prefetch.h"

#include <stdlib.h>

#include "interpose/allocations.h"
#include "interpose/driver.h"
#include "interpose/relax.h"

#define LEAST_BYTES ((uint64_t)2 << 20) /* what the driver moves at once; below it a call costs as much as the faults */
#define BLOCKS_MAX 1024u                /* each is a call of some microseconds, before a launch */

static bool is_worth_moving(const struct aq_entry *entry, void *context)
{
	const struct aq_place *place = context;

	return entry->kind == AQ_VIRTUAL && (int)entry->device == place->device && entry->bytes >= LEAST_BYTES;
}

/* The block as the driver has it, which uses no more than the request: the charge may be larger. */
static bool cut_to_size(struct aq_entry *block)
{
	size_t bytes;

	if (aq_cuda.cuMemGetAddressRange_v2(NULL, &bytes, block->key) != CUDA_SUCCESS)
		return false;
	block->bytes = bytes;
	return true;
}

/* Blocks that were requested as device memory prefer the device; a program's own managed memory does where the program asked for that. */
static bool belongs_here(const struct aq_entry *block, CUdevice ordinal)
{
	int preferred = CU_DEVICE_INVALID;

	return aq_cuda.cuMemRangeGetAttribute(&preferred, sizeof(preferred), CU_MEM_RANGE_ATTRIBUTE_PREFERRED_LOCATION, block->key,
					      block->bytes) == CUDA_SUCCESS &&
	       preferred == ordinal;
}

/* Drivers before CUDA 12.2 have the older form alone. */
static CUresult move(const struct aq_entry *block, CUdevice ordinal, CUstream stream, bool per_thread)
{
	CUmemLocation here = { .type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal };
	CUresult result = per_thread ? aq_cuda.cuMemPrefetchAsync_v2_ptsz(block->key, block->bytes, here, 0, stream)
				     : aq_cuda.cuMemPrefetchAsync_v2(block->key, block->bytes, here, 0, stream);

	if (result != CUDA_ERROR_NOT_SUPPORTED)
		return result;
	return per_thread ? aq_cuda.cuMemPrefetchAsync_ptsz(block->key, block->bytes, ordinal, stream)
			  : aq_cuda.cuMemPrefetchAsync(block->key, block->bytes, ordinal, stream);
}

void aq_prefetch(const struct aq_place *place, CUstream stream, bool per_thread, uint64_t room_bytes)
{
	struct aq_place wanted = *place;
	struct aq_entry *blocks = room_bytes ? malloc(BLOCKS_MAX * sizeof(*blocks)) : NULL;
	size_t count = blocks ? aq_map_list(&aq_pointers, is_worth_moving, &wanted, blocks, BLOCKS_MAX) : 0;
	CUresult result = CUDA_SUCCESS;

	CUstreamCaptureMode mode = aq_relax();
	/* A block that another thread frees meanwhile makes the driver return an error; the device may also not support this. */
	for (size_t i = 0; i < count && result != CUDA_ERROR_INVALID_DEVICE; i++) {
		uint64_t takes_bytes = blocks[i].bytes;

		if (takes_bytes > room_bytes || !cut_to_size(&blocks[i]) || !belongs_here(&blocks[i], place->ordinal))
			continue;
		result = move(&blocks[i], place->ordinal, stream, per_thread);
		room_bytes -= result == CUDA_SUCCESS ? takes_bytes : 0;
	}
	aq_restrict(mode);
	free(blocks);
}
