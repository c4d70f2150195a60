/* SPDX-License-Identifier: Apache-2.0 */
/* Reservoirs: memory that the driver takes and gives back on its own account: stream-ordered pools, and each device's graph memory.
 *
 * The charge is what the driver says it has reserved. A call that may make a reservoir grow is bracketed: before it, enough is charged
 * under the reservoir's gate; after it, the charge is set to what was really taken. Reservoirs shrink inside the driver (at
 * synchronisation, by trimming). The shim notices that when it settles again: before a refusal, when a program queries free memory, at the
 * next growth, and where the program synchronises after a free. */
#ifndef AQ_INTERPOSE_RESERVOIR_H
#define AQ_INTERPOSE_RESERVOIR_H

#include <stdbool.h>
#include <stdint.h>

#include "interpose/context.h"
#include "interpose/latch.h"

struct aq_reservoir {
	struct aq_latch gate;
	/* NULL: the device's graph memory. Read without the gate while an entry is used again, as the next two are */
	_Atomic CUmemoryPool pool;
	_Atomic int device;
	_Atomic CUdevice ordinal;
	_Atomic bool in_use;        /* false: the pool is destroyed; the entry may be used again */
	/* destroyed by the program; the driver destroys it once it holds nothing, because it cannot be queried after that */
	_Atomic bool ending;
	_Atomic uint64_t charged_bytes;
	_Atomic bool overdrawn;     /* past the limit since a call was undone: its idle memory is owed to the device */
	_Atomic bool freed;         /* the driver may give memory of it back at the next synchronisation, since something was freed */
	_Atomic bool may_be_gone;   /* the primary context of its device has ended since the driver last knew it */
	_Atomic bool unsettled;     /* memory was taken from inside another call, or the driver did not report what is reserved */
	uint64_t piece_bytes;       /* what it takes from the device comes in whole ones of these, as far as was seen */
	struct {                    /* graph memory, with the gate held */
		unsigned runs;      /* calls under way that may take of it … */
		unsigned repeats;   /* … and how many of them are not charged */
		uint64_t charged;   /* how many the others have been so far */
		uint64_t last;      /* the graph that ran last, and alone; 0 = no such graph */
		uint64_t last_bytes; /* that were reserved when it had */
	} graphs;
	struct aq_reservoir *next;
};

/* How the call to come is expected to be served. */
enum aq_growth_hope {
	AQ_AT_ONCE,     /* from the device: all that it may take is charged before, without taking anything back from others */
	AQ_FROM_IDLE,   /* from what the reservoir holds idle, if it does not fit otherwise: the driver may take more all the same */
	AQ_FROM_DEVICE, /* from the device, after taking back what others hold idle */
};

/* A bracket around one call to the driver. */
struct aq_growth {
	struct aq_reservoir *reservoir;
	uint64_t bytes; /* requested */
	uint64_t most_bytes; /* that the call may take, where more than `bytes`: charged if the driver does not report what it took */
	uint64_t charged_bytes;
	bool is_nested; /* the driver called back into the program, which requests more memory in this thread: no gate is taken */
	uint64_t run;   /* of graph memory: the number of this call … */
	bool alone;     /* … under way without another one so far */
	uint64_t graph; /* the graph that ran, to be set before the end; 0 = no graph ran */
	bool failed;    /* the call took nothing, to be set before the end; matters where the driver does not report what is reserved */
};

/* The reservoir of a pool; NULL for pools that this process does not pay for (on the host, or imported from the process that pays). An
 * error when the driver does not report what kind of pool it is, or without memory to record it. */
CUresult aq_reservoir_find_of_pool(CUmemoryPool pool, struct aq_reservoir **reservoir);
struct aq_reservoir *aq_reservoir_add_pool(CUmemoryPool pool, CUdevice ordinal);
struct aq_reservoir *aq_reservoir_of_graphs(CUdevice ordinal);

/* Open the bracket for a call that takes up to `bytes`: charged now, with the gate held. False = does not fit; no gate is held. */
bool aq_growth_begin(struct aq_growth *growth, struct aq_reservoir *reservoir, uint64_t bytes, enum aq_growth_hope hope);
/* Around a call that may wait for the device: release the gate, and take it again. Others may settle meanwhile and count the growth twice,
 * but never miss it. */
void aq_growth_open_gate(struct aq_growth *growth);
void aq_growth_close_gate(struct aq_growth *growth);
/* Close the bracket. False = the driver took more than the limit leaves, and the gate is still held: undo the call, then
 * aq_growth_undone. */
bool aq_growth_end(struct aq_growth *growth);
/* The memory goes back to the device before this returns, unless `stream`, which orders the undoing, does not reach it within about a
 * second (it may wait for something that this thread has yet to do). Then it stays charged, past the limit, and goes back at a later call
 * that settles. */
void aq_growth_undone(struct aq_growth *growth, CUstream stream, bool per_thread);

/* May this graph run without a charge? Yes for the graph that ran last, with no other in progress: its memory is still reserved. If true,
 * aq_repeat_end has to follow. Until then no graph memory is uncharged, because memory trimmed now may be taken again. */
bool aq_repeat_begin(struct aq_reservoir *reservoir, uint64_t graph);
void aq_repeat_end(struct aq_reservoir *reservoir);

/* The device's primary context has ended, and may have ended its pools: from now on the driver's word that a pool is unknown is taken. */
void aq_reservoirs_context_gone(int device, uint64_t owner);
/* Charge what each reservoir of a device holds now. */
void aq_reservoirs_settle(int device);
/* Give unused memory of the device's reservoirs back to the driver, and settle. */
void aq_reservoirs_trim(int device);
/* Give back what could not go back when a call was undone. Costs one load when there is nothing to give back. */
void aq_reservoirs_return_overdrawn(void);

/* The program has waited for the device, and the driver gives freed memory back there: uncharge it. Does not wait for a gate, because a
 * thread that allocates may hold it while it waits for the device; what is missed here is seen the next time. Costs one load when no memory
 * was freed. */
void aq_reservoirs_synchronized(void);

/* One of its allocations was freed. */
void aq_reservoir_freed(struct aq_reservoir *reservoir);
/* Destroy a pool for the program: at once if it holds nothing. The driver would release the rest when its last allocation is freed and the
 * streams have reached the frees, and it does not report when. So the pool stays alive and hidden, keeps no idle memory, and can be queried
 * until then. */
CUresult aq_reservoir_destroy(struct aq_reservoir *reservoir);
/* Whether the program has destroyed this pool already. */
bool aq_reservoir_is_ending(CUmemoryPool pool);

/* In a forked child. */
void aq_reservoirs_forget(void);

#endif
