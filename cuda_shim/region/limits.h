/* SPDX-License-Identifier: Apache-2.0 */
/* The container's limits: the agent's page, mapped read-only, and this process's checked copy of it.
 *
 * Hot paths read the copy, one relaxed load per word, after comparing one generation word of the page. A page that is being written, or has
 * a wrong checksum, leaves the copy as it was: no process waits for the agent. */
#ifndef AQ_REGION_LIMITS_H
#define AQ_REGION_LIMITS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "log.h"
#include "region/layout.h"

struct aq_device_limit {
	char uuid_text[AQ_UUID_BYTES];
	unsigned char uuid[16];
	_Atomic uint64_t memory_bytes; /* after overhead_bytes was taken off */
	_Atomic uint64_t burst_bytes;  /* ceiling with oversubscription, after overhead_bytes was taken off; 0 = no oversubscription */
	_Atomic uint64_t overhead_bytes;
	_Atomic uint64_t context_bytes;
	_Atomic uint32_t sm_percent;
	_Atomic uint32_t pause;
	_Atomic int32_t priority;
	_Atomic uint32_t priority_line; /* from 1; 0 = no line */
};

struct aq_limits {
	const struct aq_limits_header *page;
	size_t bytes;
	_Atomic uint64_t generation; /* of the page, at which the copy was taken or found damaged */
	_Atomic bool refreshing;
	uint32_t policy_flags;
	_Atomic uint32_t device_count;
	struct aq_device_limit device[AQ_MAX_DEVICES];
};

/* Map `path` and take the first copy. Returns 0; or -1 with the reason, and `limits->policy_flags` set when at least the header could be
 * read. */
int aq_limits_map(struct aq_limits *limits, const char *path, struct aq_fault *fault);
void aq_limits_unmap(struct aq_limits *limits);

/* Take a new copy. True when it was taken. */
bool aq_limits_refresh(struct aq_limits *limits);

static inline bool aq_limits_changed(const struct aq_limits *limits)
{
	return atomic_load_explicit(&limits->page->generation, memory_order_relaxed) !=
	       atomic_load_explicit(&limits->generation, memory_order_relaxed);
}

/* Position of the device with this UUID, or -1. */
int aq_limits_find(const struct aq_limits *limits, const unsigned char uuid[16]);

/* "GPU-…" or "MIG-…" to its 16 bytes. */
bool aq_uuid_parse(const char *text, unsigned char uuid[16]);

#endif
