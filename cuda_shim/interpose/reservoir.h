/* Reservoirs: memory that the driver takes and gives back on its own account: stream-ordered pools, and each device's graph memory.
 *
 * What counts is what the driver says it has reserved. A call that may make a reservoir grow is bracketed: enough is charged before
 * it, under the reservoir's gate, and what was truly taken is settled after it. Shrinking happens inside the driver (at
 * synchronisation, by trimming); it is noticed by settling again: before a refusal, when free memory is asked for, at the next growth, and
 * where the program synchronises after a free. */
#ifndef AQ_INTERPOSE_RESERVOIR_H
#define AQ_INTERPOSE_RESERVOIR_H

#include <stdbool.h>
#include <stdint.h>

#include "account/map.h"
#include "interpose/context.h"
#include "interpose/latch.h"

struct aq_reservoir {
	struct aq_latch gate;
	_Atomic CUmemoryPool pool;  /* NULL: the device's graph memory. Read without the gate while an entry is used again, as the next two are */
	_Atomic int device;
	_Atomic CUdevice ordinal;
	_Atomic bool in_use;        /* false: the pool is destroyed; the entry may be used again */
	_Atomic bool ending;        /* destroyed for the program; the driver is told once it holds nothing, for it cannot be asked after that */
	_Atomic uint64_t charged_bytes;
	_Atomic bool overdrawn;     /* past the limit since a call was undone: its idle memory is owed to the device */
	_Atomic bool freed;         /* the driver may give memory of it back at the next synchronisation, since something was freed */
	_Atomic bool unsettled;     /* something was taken from inside another call, or the driver did not say what is reserved */
	uint64_t piece_bytes;       /* what it takes from the device comes in whole ones of these, as far as was seen */
	struct {                    /* graph memory, with the gate held */
		unsigned runs;      /* calls under way that may take of it … */
		unsigned repeats;   /* … of which these are charged nothing */
		uint64_t charged;   /* how many the others have been so far */
		uint64_t last;      /* the graph that ran last, and alone; 0 = none did */
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
	uint64_t bytes; /* asked for */
	uint64_t charged_bytes;
	bool is_nested; /* the driver called back into the program, which asks this thread for more memory: no gate is taken */
	uint64_t run;   /* of graph memory: the number of this call … */
	bool alone;     /* … under way without another one so far */
	uint64_t graph; /* the graph that ran, to be set before the end; 0 = none did */
	bool failed;    /* the call took nothing, to be set before the end; matters where the driver does not say what is reserved */
};

/* The reservoir of a pool; NULL for pools whose memory is not ours to count (on the host, or imported from the process that pays). */
struct aq_reservoir *aq_reservoir_of_pool(CUmemoryPool pool);
struct aq_reservoir *aq_reservoir_add_pool(CUmemoryPool pool, CUdevice ordinal);
struct aq_reservoir *aq_reservoir_of_graphs(CUdevice ordinal);

/* Open the bracket for a call that takes up to `bytes`: charged now, and the gate is held. False = does not fit; nothing is held. */
bool aq_growth_begin(struct aq_growth *growth, struct aq_reservoir *reservoir, uint64_t bytes, enum aq_growth_hope hope);
/* Around a call that may wait for the device: let the gate go, and take it again. Others may settle meanwhile and see the growth twice,
 * never not at all. */
void aq_growth_open_gate(struct aq_growth *growth);
void aq_growth_close_gate(struct aq_growth *growth);
/* Close the bracket. False = the driver took more than the limit leaves, and the gate is still held: undo the call, then aq_growth_undone. */
bool aq_growth_end(struct aq_growth *growth);
/* What the call took goes back to the device before this returns, unless `stream`, in whose order it was undone, does not come to it within
 * about a second (it may wait for something that this thread is still to do). Then it stays charged, past the limit, and goes back
 * at a later call that settles. */
void aq_growth_undone(struct aq_growth *growth, CUstream stream, bool per_thread);

/* May this graph run without a charge? The one that ran last, with no other under way, finds all it needs where it left it. True:
 * aq_repeat_end has to follow, and until then nothing of the graph memory is credited, for what is trimmed now may be taken again. */
bool aq_repeat_begin(struct aq_reservoir *reservoir, uint64_t graph);
void aq_repeat_end(struct aq_reservoir *reservoir);

/* Charge what each reservoir of a device holds now. */
void aq_reservoirs_settle(int device);
/* Give unused memory of the device's reservoirs back to the driver, and settle. */
void aq_reservoirs_trim(int device);
/* Give back what could not go back when a call was undone. Costs one load when there is nothing of the kind. */
void aq_reservoirs_return_overdrawn(void);

/* The program has waited for the device, where the driver gives back what was freed: credit that. Waits for no gate, for a thread that
 * waits for the device while it allocates has it; what that one does not see is looked at the next time. A load when nothing was freed. */
void aq_reservoirs_synchronized(void);

/* One of its allocations (in aq_pointers) was asked to be freed. */
void aq_reservoir_freed(CUresult result, const struct aq_entry *held);
/* Destroy a pool for the program: at once if it holds nothing. The driver would let go of the rest when its last allocation is freed and the
 * streams have come to the frees, which nobody tells; so the pool lives on hidden, keeps nothing, and can be asked until then. */
CUresult aq_reservoir_destroy(struct aq_reservoir *reservoir);
/* Whether the program has destroyed this pool already. */
bool aq_reservoir_is_ending(CUmemoryPool pool);

/* In a forked child. */
void aq_reservoirs_forget(void);

#endif
