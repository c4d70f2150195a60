/* SPDX-License-Identifier: Apache-2.0 */
/* What happens to contexts and to the process, for all parts of the shim that keep something about it.
 *
 * A part is a file that keeps memory of contexts or of the process. Its row in parts.def lists the events it takes. context.c and
 * shim.c report events here and know no part by name. Each event goes to the parts that take it, in the order of the rows. */
#ifndef AQ_INTERPOSE_LIFE_CYCLE_H
#define AQ_INTERPOSE_LIFE_CYCLE_H

#include <stdbool.h>
#include <stdint.h>

#include "cuda_abi.h"
#include "region/container.h"

/* A context that is ending, or may be. Events in it must not be queried from then on, because it may end while another thread looks. */
struct aq_ending {
	int device;
	uint64_t owner;  /* as in struct aq_place */
	CUcontext green; /* not NULL: this green context alone, and not all that is its owner's */
};

static inline bool aq_ending_has(const struct aq_ending *ending, int device, uint64_t owner, CUcontext context)
{
	return ending->green ? context == ending->green : device == ending->device && owner == ending->owner;
}

/* One row of parts.def. */
struct aq_part {
	void (*open)(struct aq_container *container);
	void (*context_begun)(int device);
	void (*context_ending)(const struct aq_ending *ending);
	void (*context_ended)(const struct aq_ending *ending, bool has_ended);
	void (*context_gone)(int device, uint64_t owner);
	void (*reclaim)(int device);
	void (*forget)(void);
};

/* The section of the library that holds the table of parts. parts.c, which uses all parts, puts the table there. This file finds it by the
 * section's name, so files that report events do not depend on the parts. The table is complete when the library is loaded, before any
 * constructor runs. */
#define AQ_PARTS "aq_parts"

/* The process became limited. */
void aq_parts_open(struct aq_container *container);
/* A context of the device began. */
void aq_parts_context_begun(int device);
/* Around a call that may end a context: nothing in it is touched meanwhile. If it ended, all that was in it has ended too. */
void aq_parts_context_ending(const struct aq_ending *ending);
void aq_parts_context_ended(const struct aq_ending *ending, bool has_ended);
/* A context has ended: uncharge what it owned. `owner` as in struct aq_place. */
void aq_parts_context_gone(int device, uint64_t owner);
/* Give back to the driver what this process holds idle of the device. */
void aq_parts_reclaim(int device);
/* In a forked child: it has neither the parent's contexts nor its memory. */
void aq_parts_forget(void);

#endif
