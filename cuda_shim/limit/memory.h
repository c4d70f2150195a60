/* SPDX-License-Identifier: Apache-2.0 */
/* What a container takes of a device's memory, and what it sees of it. Pure: numbers in, numbers out. */
#ifndef AQ_LIMIT_MEMORY_H
#define AQ_LIMIT_MEMORY_H

#include <stdint.h>

#define AQ_UNIT_BYTES 512u                 /* the driver aligns all memory and every row to this */
#define AQ_SMALL_BYTES ((uint64_t)1 << 20) /* what is no larger shares its pages with others of its kind */
#define AQ_PAGE_BYTES ((uint64_t)2 << 20)  /* of a device's memory */

/* A multiple of `unit`, which is a power of two. Saturates: what does not fit is more than any device has. */
static inline uint64_t aq_whole_bytes(uint64_t bytes, uint64_t unit)
{
	uint64_t rounded;

	return __builtin_add_overflow(bytes, unit - 1, &rounded) ? UINT64_MAX : rounded & ~(unit - 1);
}

/* What the device loses by an allocation. Were the bare request charged, pieces of one byte could take 512 times what they are charged, and
 * those of little more than a megabyte twice as much. */
static inline uint64_t aq_footprint_bytes(uint64_t bytes)
{
	return aq_whole_bytes(bytes, bytes > AQ_SMALL_BYTES ? AQ_PAGE_BYTES : AQ_UNIT_BYTES);
}

static inline uint64_t aq_min_bytes(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

/* The container's whole: its limit, but never more than the device has. */
static inline uint64_t aq_limit_total(uint64_t limit_bytes, uint64_t physical_total)
{
	return aq_min_bytes(limit_bytes, physical_total);
}

/* What it can still allocate: what the limit leaves, but never more than is physically free; 0 when the limit was lowered below the
 * usage. */
static inline uint64_t aq_limit_free(uint64_t limit_bytes, uint64_t used_bytes, uint64_t physical_free)
{
	return aq_min_bytes(used_bytes < limit_bytes ? limit_bytes - used_bytes : 0, physical_free);
}

#endif
