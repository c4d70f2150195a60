/* SPDX-License-Identifier: Apache-2.0 */
/* The container's usage region, mapped; this process's slot in it; reaping of slots of ended processes.
 *
 * The protocol and why it is safe are in layout.h. Hot paths use only the two pointers `aq_region_line` and `aq_region_mine` give;
 * everything else here is cold. */
#ifndef AQ_REGION_REGION_H
#define AQ_REGION_REGION_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "log.h"
#include "region/layout.h"

struct aq_region {
	unsigned char *base;
	size_t bytes;
	uint32_t device_offset, device_stride;
	uint32_t slot_offset, slot_stride, slot_count;
	uint32_t virtual_offset, virtual_stride; /* offset 0 = no virtual ledgers */
	int lock_fd;                 /* an open file description of its own: its locks show that this process is alive; -1 = closed */
	int slot_index;              /* -1 = no slot */
	pthread_mutex_t reaping;     /* threads of one process share the description, so its locks do not keep them apart */
};

enum aq_region_access { AQ_REGION_READ, AQ_REGION_WRITE };

/* Map `path`. Returns 0, or -1 with the reason. */
int aq_region_map(struct aq_region *region, const char *path, enum aq_region_access access, struct aq_fault *fault);
void aq_region_unmap(struct aq_region *region);

/* Take a slot for this process, reaping dead ones first. Returns 0, or -1 with the reason. */
int aq_region_take_slot(struct aq_region *region, struct aq_fault *fault);

/* In a forked child: release what belongs to the parent. The child has no slot and may map again. */
void aq_region_forget(struct aq_region *region);

/* Credit the slots of dead processes and repair leaks, on all devices. True when anything came back. */
bool aq_region_reclaim(struct aq_region *region);

/* Only the former, and without looking for leaks. */
void aq_region_reap(struct aq_region *region);

struct aq_region_slot *aq_region_slot(const struct aq_region *region, uint32_t index);
struct aq_region_device *aq_region_line(const struct aq_region *region, uint32_t device);
struct aq_slot_device *aq_region_mine(const struct aq_region *region, uint32_t device);
/* The virtual ledger of a slot; NULL in a region without one (minor version 0). */
struct aq_virtual_device *aq_region_virtual(const struct aq_region *region, uint32_t index, uint32_t device);

/* Is the slot taken by a living process? Looks only; right for the caller's own slot too. */
bool aq_region_is_live(const struct aq_region *region, uint32_t index);

/* The pid of a living slot's process as the caller's pid namespace has it; 0 = it cannot be seen from there. One system call. */
uint32_t aq_region_pid(const struct aq_region *region, uint32_t index);

/* How long ago the last owner of a free slot was found to have ended, if its payments are still to be compared; else -1. */
int64_t aq_region_ended_ago_ns(const struct aq_virtual_device *ledger, int64_t now_ns);

/* What a slot holds of a device. */
uint64_t aq_slot_used_bytes(const struct aq_slot_device *device);
/* What it holds of virtual memory; `ledger` may be NULL. */
uint64_t aq_virtual_used_bytes(const struct aq_virtual_device *ledger);

#endif
