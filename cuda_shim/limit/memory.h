/* What a container sees of a device's memory. Pure: numbers in, numbers out. */
#ifndef AQ_LIMIT_MEMORY_H
#define AQ_LIMIT_MEMORY_H

#include <stdint.h>

static inline uint64_t aq_min_bytes(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

/* The container's whole: its limit, but never more than the device has. */
static inline uint64_t aq_limit_total(uint64_t limit_bytes, uint64_t physical_total)
{
	return aq_min_bytes(limit_bytes, physical_total);
}

/* What it can still allocate: what the limit leaves, but never more than is physically free. A limit that was lowered below the use leaves nothing. */
static inline uint64_t aq_limit_free(uint64_t limit_bytes, uint64_t used_bytes, uint64_t physical_free)
{
	return aq_min_bytes(used_bytes < limit_bytes ? limit_bytes - used_bytes : 0, physical_free);
}

#endif
