/* SPDX-License-Identifier: Apache-2.0 */
/* How much of its work a process keeps unfinished on a device.
 *
 * Work in flight cannot be taken back: a pause or a lower ceiling takes effect when it is done, and work of high priority waits for what
 * all processes of low priority have in flight together. They cannot count each other, because they are in different containers. But each
 * sees how much of its own work the device finishes, and all that together is no more than the device can do. So each keeps in flight what
 * the device finished of its own in the last milliseconds: its part of AQ_IN_FLIGHT_NS. Then all together keep that much and one launch
 * more, for any number of processes. It does not matter how wrong the estimated costs are, because both sides are counted in them.
 *
 * A process has at least one launch in flight, so it has exactly one when launches are longer than AQ_IN_FLIGHT_NS.
 *
 * One process on one device; times are paid time (limit/cost.h) or CLOCK_MONOTONIC, which is an argument. All zero is a process that has
 * done nothing yet.
 */
#ifndef AQ_LIMIT_IN_FLIGHT_H
#define AQ_LIMIT_IN_FLIGHT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define AQ_IN_FLIGHT_NS 4000000ll /* unfinished work of the process when it launches more; of all of low priority together */
#define AQ_IN_FLIGHT_CEILING_NS 10000000ll
#define AQ_PART_ONE 65536u        /* the whole device, in Q16 */
#define AQ_PART_LEAST (AQ_PART_ONE / 32)

struct aq_in_flight {
	_Atomic int64_t submitted_ns;
	_Atomic int64_t finished_ns;     /* of what was submitted, as far as is known */
	_Atomic int64_t looked_at_ns;    /* the last look … */
	_Atomic int64_t looked_ns;       /* … and what was finished then */
	_Atomic uint32_t part_q16;       /* of the device's time that was this process's lately; 0 = not known yet */
};

/* Take in what has finished until now. One thread at a time. */
void aq_in_flight_look(struct aq_in_flight *flight, int64_t now_ns);

/* The part of the device that the process gets; all of it while that is not known. */
uint32_t aq_in_flight_part(const struct aq_in_flight *flight);

/* May a process with that part launch this much more? */
bool aq_in_flight_has_room(const struct aq_in_flight *flight, uint32_t part_q16, int64_t cost_ns);

/* How long to wait without any progress: then the device may be waiting for a launch that is still to come. */
int64_t aq_in_flight_patience_ns(const struct aq_in_flight *flight, uint32_t part_q16);

/* All that was submitted counts as finished. */
void aq_in_flight_give_up(struct aq_in_flight *flight);

/* In a forked child, which has submitted nothing. */
void aq_in_flight_forget(struct aq_in_flight *flight);

/* Wall-clock time that this much paid time takes for a process with that part. */
static inline int64_t aq_in_flight_stretch(int64_t paid_ns, uint32_t part_q16)
{
	return paid_ns * AQ_PART_ONE / part_q16;
}

/* The part for a container with that ceiling: what it gets in AQ_IN_FLIGHT_CEILING_NS. Costs that are known too low cannot bring much more
 * than that to the device before they are known better. It outlasts the time slices that a device gives to some neighbours. */
static inline uint32_t aq_in_flight_part_of_ceiling(uint32_t percent)
{
	int64_t part = AQ_IN_FLIGHT_CEILING_NS * percent / 100 * AQ_PART_ONE / AQ_IN_FLIGHT_NS;

	return part < AQ_PART_LEAST ? AQ_PART_LEAST : part < AQ_PART_ONE ? (uint32_t)part : AQ_PART_ONE;
}

/* In what steps to pay and to look for progress: both are small compared with what may be in flight. */
static inline int64_t aq_in_flight_step_ns(uint32_t part_q16)
{
	return AQ_IN_FLIGHT_NS / 4 * part_q16 / AQ_PART_ONE;
}

#endif
