/* SPDX-License-Identifier: Apache-2.0 */
/* The slow correction of the compute bucket: what the driver measured is settled against what was paid.
 *
 * Launches pay what they are thought to cost, and those that are timed settle the difference at once (settle.h). That is right within
 * milliseconds but has a bias: concurrent kernels overlap, device-side launches and ended processes are invisible, and a neighbour
 * stretches what is timed. The driver's own utilisation figures have no such bias, but come late. So both are compared for each living
 * process, and summed up for the container: what the driver measured beyond what was paid is taken from the balance, as a debt. What was
 * paid beyond is given back little by little, to launches that would have to wait.
 *
 * A payment may be for work that is still to be done or reported, so it counts as paid ahead only if no figure covers it for some time.
 *
 * Of a process that has ended the driver may still report use, for about ten seconds: its kernel module does, and what the NVML library
 * leaves out is not known. So what an ended process paid and no figure covered is given back only if figures named a process after its end
 * lately, and none passed in which this one could not be named. Otherwise it counts as used. What figures round away of their
 * use is not given back either, beyond one process each time: so many short processes gain nothing by it.
 *
 * Sums forget nothing: however launches are priced, over seconds the container gets its ceiling. They need no correction of the inflow.
 *
 * A measurement describes the past. When launches were free for a while, the next measurements still reflect that time: they are skipped. A
 * container that had the whole device and is now limited to a twentieth of it must not be throttled for its past usage.
 *
 * One process of the container does it at a time: the one that takes the lease, at a moment when it has to wait anyway. While no process
 * waits, it is done less often, because it delays a launch.
 */
#ifndef AQ_LIMIT_CONTROL_H
#define AQ_LIMIT_CONTROL_H

#include "limit/bucket.h"
#include "limit/settle.h"

#define AQ_CONTROL_PERIOD_NS 100000000ll /* 100 ms */
#define AQ_CONTROL_UNHELD_NS 400000000ll /* while nothing waits: it delays a launch */
#define AQ_CONTROL_GAP_NS 1000000000ll   /* a figure over a longer time may be of its end only: it counts for that, and as a debt */
#define AQ_CONTROL_LATE_NS 200000000ll   /* the driver's figures come so much later than what they are of */
#define AQ_CONTROL_ENDED_NS 350000000ll  /* all use of an ended process is reported so long after its end … */
#define AQ_CONTROL_NAMED_NS 10000000000ll /* a figure that named an ended process shows for so long that the driver does that */
#define AQ_CONTROL_KEPT_NS 2000000000ll  /* … but later figures are compared, too */
#define AQ_CONTROL_STALE 3u              /* periods skipped after free launches: the driver's samples are up to two wide */

/* One process of the container: a living one that the driver names, or one that has ended lately. */
struct aq_process_use {
	struct aq_compared *compared;
	int64_t paid_ns;     /* since it began; of an ended one 0, `compared` has it */
	uint32_t share_q16;  /* of the device's time, in the figure */
	bool has_ended;
};

/* What the driver measured for the container since its figure before. */
struct aq_measured {
	uint64_t until_us;   /* the driver's clock */
	int64_t at_ns;       /* CLOCK_MONOTONIC */
	int64_t span_ns;     /* since the figure before; 0 = there was none */
	uint32_t share_q16;  /* of the device's time; 65536 = all of it */
	bool is_complete;    /* it names all processes of the container that have a context on the device */
	const struct aq_process_use *process; /* those that it names */
	unsigned count;
};

/* For the one caller that must measure now: it holds the lease for the next period. `is_held`: it has to wait. */
bool aq_control_take_lease(struct aq_bucket *bucket, int64_t now_ns, bool is_held);

/* No ceiling applies to the container now: measurements from here on are without a ceiling. */
void aq_control_interrupted(struct aq_bucket *bucket);

/* What a process owes by a figure in which it used `measured_ns`; below zero: it paid ahead. */
int64_t aq_control_compare(struct aq_compared *process, int64_t now_ns, int64_t paid_ns, int64_t measured_ns);

/* What a process paid and no figure has covered. */
int64_t aq_control_uncovered(const struct aq_compared *process, int64_t paid_ns);
/* All that the process launched has been reported: what no figure covered was paid ahead. */
void aq_control_conclude(struct aq_settlement *settlement, struct aq_compared *process, int64_t paid_ns);

/* A process has ended, and paid so much since it began. False if there is nothing to compare. */
bool aq_control_end(struct aq_compared *process, int64_t paid_ns);
/* What an ended process owes by a figure in which it used `measured_ns`, or up to `rounding_ns` more; never below zero. */
int64_t aq_control_compare_ended(struct aq_compared *process, int64_t measured_ns, int64_t rounding_ns);
/* Figures may lack some of its use: all that it paid counts as used. */
void aq_control_forfeit(struct aq_compared *process);
/* So long after it was found to have ended: what no figure covered was paid ahead, if the driver names such processes. `may_be_unseen`: a
 * very short use may have been in no figure. True if that was concluded. */
bool aq_control_conclude_ended(struct aq_settlement *settlement, struct aq_compared *process, int64_t now_ns, int64_t ended_ago_ns,
			       bool may_be_unseen);

/* Fold one measurement in, and take what is owed. */
void aq_control_settle(struct aq_bucket *bucket, struct aq_settlement *settlement, uint32_t percent, const struct aq_measured *measured);

/* A launch has to wait. Give back a part of what was paid ahead, if there is any. */
void aq_control_give_back(struct aq_bucket *bucket, struct aq_settlement *settlement);
/* Or all of it. */
void aq_control_give_all_back(struct aq_bucket *bucket, struct aq_settlement *settlement);

#endif
