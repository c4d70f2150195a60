/* SPDX-License-Identifier: Apache-2.0 */
/* Managed memory that the program moves between devices: the device it may go to is charged before the call (spread.h), or the call
 * fails. */
#include <stdlib.h>

#include "interpose/allocations.h"
#include "interpose/capture.h"
#include "interpose/context.h"
#include "interpose/driver.h"
#include "interpose/spread.h"
#include "shim.h"

struct moves {
	size_t count, room;
	struct aq_spread_move *move;
};

/* ---- which memory a range is ------------------------------------------------------------------------------------ */

struct containing {
	uint64_t address;
	bool found;
};

/* The charge is at least the block's size. */
static bool may_contain(const struct aq_entry *entry, void *context)
{
	struct containing *containing = context;

	containing->found |= containing->address - entry->key < entry->bytes;
	return false;
}

/* The driver does not know memory of the system, which it can also move where the hardware supports that; nothing says how much of it a
 * program has, and the agent's audit counts it. But what this process allocated is not that, whatever the driver replies. */
static bool is_of_system(uint64_t address, CUresult reply)
{
	struct containing containing = { .address = address };

	if (reply != CUDA_ERROR_NOT_FOUND && reply != CUDA_ERROR_INVALID_VALUE)
		return false;
	aq_map_drain(&aq_pointers, may_contain, NULL, &containing); /* removes nothing */
	return !containing.found && !aq_spread_contains(address);
}

static CUresult find_block(uint64_t address, struct aq_spread_block *block, bool *of_system)
{
	CUdeviceptr base = 0;
	size_t bytes = 0;
	CUresult result = aq_cuda.cuMemGetAddressRange_v2(&base, &bytes, address);

	*of_system = result != CUDA_SUCCESS && is_of_system(address, result);
	*block = (struct aq_spread_block){ .base = base, .bytes = bytes, .allocations = &aq_pointers };
	return *of_system ? CUDA_SUCCESS : result;
}

/* ---- moving ---------------------------------------------------------------------------------------------------- */

static struct aq_spread_move *next_of(struct moves *moves)
{
	if (moves->count == moves->room) {
		size_t room = moves->room ? 2 * moves->room : 4;
		struct aq_spread_move *more = realloc(moves->move, room * sizeof(*more));

		if (!more)
			return NULL;
		moves->move = more;
		moves->room = room;
	}
	return &moves->move[moves->count];
}

/* Is it a block that lies where it was made, and stays there? The common case, which needs no query. */
static bool is_at_home(uint64_t address, size_t bytes, CUdevice ordinal)
{
	struct aq_entry held;

	return aq_map_get(&aq_pointers, address, &held) && (held.kind == AQ_MANAGED || held.kind == AQ_VIRTUAL) && bytes <= held.bytes &&
	       (int)held.device == aq_device_of(ordinal);
}

/* A range may cover several blocks that lie side by side. `keeps`: pages may come back without a call. */
static CUresult begin(struct moves *moves, uint64_t address, size_t bytes, CUdevice ordinal, bool keeps)
{
	struct aq_spread_block block;
	bool of_system;

	if (!keeps && is_at_home(address, bytes, ordinal))
		return CUDA_SUCCESS;
	while (bytes) {
		CUresult result = find_block(address, &block, &of_system);
		if (result != CUDA_SUCCESS || of_system)
			return result;
		uint64_t left = block.base + block.bytes - address, part = bytes < left ? bytes : left;
		struct aq_spread_move *move = part ? next_of(moves) : NULL;
		if (!move || (keeps && !aq_spread_keep(&block)) || !aq_spread_begin(move, &block, address, part, aq_device_of(ordinal)))
			return CUDA_ERROR_OUT_OF_MEMORY;
		moves->count++;
		address += part;
		bytes -= part;
	}
	return CUDA_SUCCESS;
}

static void end(struct moves *moves, bool made, bool leaves, CUstream stream, bool per_thread)
{
	for (size_t i = 0; i < moves->count; i++)
		aq_spread_end(&moves->move[i], made, leaves, stream, per_thread);
	free(moves->move);
}

/* A captured prefetch runs whenever its graph does. */
static bool is_captured(CUstream stream, bool per_thread)
{
	bool captured;

	return aq_capture_query(stream, per_thread, &captured) != CUDA_SUCCESS || captured;
}

/* AQ_NO_ORDINAL for the host: what goes there stays charged, because a fault brings it back. */
static CUdevice ordinal_of(const CUmemLocation *location)
{
	if (location->type == CU_MEM_LOCATION_TYPE_DEVICE)
		return location->id;
	return location->type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN ? location->id & 0xff : AQ_NO_ORDINAL;
}

#define MOVE(address, bytes, ordinal, stream, is_per_thread, call)                                          \
	do {                                                                                                \
		struct moves moves = { 0 };                                                                 \
		CUdevice to = (ordinal);                                                                    \
		AQ_LIMITED_OR_RETURN(call);                                                                 \
		if (to < 0)                                                                                 \
			return aq_cuda.call;                                                                \
		bool captured = is_captured(stream, is_per_thread);                                         \
		CUresult result = begin(&moves, address, bytes, to, captured);                              \
		bool fits = result == CUDA_SUCCESS;                                                         \
		if (fits)                                                                                   \
			result = aq_cuda.call;                                                              \
		end(&moves, fits && result == CUDA_SUCCESS, !captured, stream, is_per_thread);              \
		return result;                                                                              \
	} while (0)

#define PREFETCH_HOOKS(suffix, is_per_thread)                                                                                     \
	CUresult cuMemPrefetchAsync##suffix(CUdeviceptr address, size_t bytes, CUdevice device, CUstream stream)                  \
	{                                                                                                                         \
		MOVE(address, bytes, device, stream, is_per_thread, cuMemPrefetchAsync##suffix(address, bytes, device, stream));  \
	}                                                                                                                         \
	CUresult cuMemPrefetchAsync_v2##suffix(CUdeviceptr address, size_t bytes, CUmemLocation location, unsigned int flags,     \
					       CUstream stream)                                                                   \
	{                                                                                                                         \
		MOVE(address, bytes, ordinal_of(&location), stream, is_per_thread,                                                \
		     cuMemPrefetchAsync_v2##suffix(address, bytes, location, flags, stream));                                     \
	}

PREFETCH_HOOKS(, false)
PREFETCH_HOOKS(_ptsz, true)

/* ---- several ranges at once -------------------------------------------------------------------------------------- */

#define BATCH_PARAMETERS                                                                                             \
	CUdeviceptr *addresses, size_t *sizes, size_t count, CUmemLocation *locations, size_t *first_of_location,   \
		size_t location_count, unsigned long long flags, CUstream stream
#define BATCH_ARGUMENTS addresses, sizes, count, locations, first_of_location, location_count, flags, stream

/* A location holds from the range with its number to the next location's. */
static CUresult begin_batch(struct moves *moves, const CUdeviceptr *addresses, const size_t *sizes, size_t count,
			    const CUmemLocation *locations, const size_t *first_of_location, size_t location_count, bool keeps)
{
	CUresult result = CUDA_SUCCESS;
	size_t at = 0;

	for (size_t i = 0; i < count && result == CUDA_SUCCESS; i++) {
		while (at + 1 < location_count && first_of_location[at + 1] <= i)
			at++;
		CUdevice ordinal = ordinal_of(&locations[at]);
		if (ordinal >= 0)
			result = begin(moves, addresses[i], sizes[i], ordinal, keeps);
	}
	return result;
}

#define BATCH_HOOK(name, is_per_thread)                                                                              \
	CUresult name(BATCH_PARAMETERS)                                                                              \
	{                                                                                                            \
		struct moves moves = { 0 };                                                                          \
		AQ_LIMITED_OR_RETURN(name(BATCH_ARGUMENTS));                                                         \
		if (!addresses || !sizes || !locations || !first_of_location || !location_count)                     \
			return aq_cuda.name(BATCH_ARGUMENTS); /* the driver reports the error */                     \
		bool captured = is_captured(stream, is_per_thread);                                                  \
		CUresult result = begin_batch(&moves, addresses, sizes, count, locations, first_of_location,         \
					      location_count, captured);                                             \
		bool fits = result == CUDA_SUCCESS;                                                                  \
		if (fits)                                                                                            \
			result = aq_cuda.name(BATCH_ARGUMENTS);                                                      \
		end(&moves, fits && result == CUDA_SUCCESS, !captured, stream, is_per_thread);                       \
		return result;                                                                                       \
	}

BATCH_HOOK(cuMemPrefetchBatchAsync, false)
BATCH_HOOK(cuMemPrefetchBatchAsync_ptsz, true)
BATCH_HOOK(cuMemDiscardAndPrefetchBatchAsync, false)
BATCH_HOOK(cuMemDiscardAndPrefetchBatchAsync_ptsz, true)

/* ---- advice ---------------------------------------------------------------------------------------------------- */

/* A preferred device gets the pages at the next fault, from wherever they are, and pages that are mostly read are copied. */
static CUresult begin_advice(struct moves *moves, uint64_t address, size_t bytes, CUmem_advise advice, CUdevice ordinal)
{
	struct aq_spread_block block;
	bool of_system;

	if (advice == CU_MEM_ADVISE_SET_PREFERRED_LOCATION)
		return ordinal < 0 ? CUDA_SUCCESS : begin(moves, address, bytes, ordinal, true);
	if (advice != CU_MEM_ADVISE_SET_READ_MOSTLY)
		return CUDA_SUCCESS;
	CUresult result = find_block(address, &block, &of_system);
	if (result != CUDA_SUCCESS || of_system)
		return result;
	return aq_spread_keep(&block) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

#define ADVISE(ordinal, call)                                                                \
	do {                                                                                 \
		struct moves moves = { 0 };                                                  \
		AQ_LIMITED_OR_RETURN(call);                                                  \
		CUresult result = begin_advice(&moves, address, bytes, advice, ordinal);     \
		bool fits = result == CUDA_SUCCESS;                                          \
		if (fits)                                                                    \
			result = aq_cuda.call;                                               \
		end(&moves, fits && result == CUDA_SUCCESS, false, NULL, false);             \
		return result;                                                               \
	} while (0)

CUresult cuMemAdvise(CUdeviceptr address, size_t bytes, CUmem_advise advice, CUdevice device)
{
	ADVISE(device, cuMemAdvise(address, bytes, advice, device));
}

CUresult cuMemAdvise_v2(CUdeviceptr address, size_t bytes, CUmem_advise advice, CUmemLocation location)
{
	ADVISE(ordinal_of(&location), cuMemAdvise_v2(address, bytes, advice, location));
}
