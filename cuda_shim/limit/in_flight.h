/* How much of its work a process keeps unfinished on a device.
 *
 * What is in flight cannot be taken back: a pause or a lower ceiling acts when it is done, and work of high priority waits for what all processes of
 * low priority have in flight together. None of them can count the others, who are in other containers. But each sees what the device
 * finishes of its own, and all that together is no more than the device can do. So each keeps in flight what the device did of its own in the
 * last milliseconds, its part of AQ_IN_FLIGHT_NS: then all together keep that much and one launch more, however many they are. It does not
 * matter either how wrong the costs are that work is counted in, for they are the same on both sides.
 *
 * A process has at least one launch in flight, so launches that are long beside AQ_IN_FLIGHT_NS are one for each process.
 *
 * One process on one device; times are paid time (limit/cost.h) or CLOCK_MONOTONIC, which is an argument. All zero is a process that has done nothing yet.
 */
#ifndef AQ_LIMIT_IN_FLIGHT_H
#define AQ_LIMIT_IN_FLIGHT_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#define AQ_IN_FLIGHT_NS 4000000ll /* unfinished work of the process when it launches more; of all of low priority together */
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

/* May so much more be launched by who has that part? */
bool aq_in_flight_has_room(const struct aq_in_flight *flight, uint32_t part_q16, int64_t cost_ns);

/* How long to wait without any progress: then the device may be waiting for a launch that is still to come. */
int64_t aq_in_flight_patience_ns(const struct aq_in_flight *flight, uint32_t part_q16);

/* All that was submitted counts as finished. */
void aq_in_flight_give_up(struct aq_in_flight *flight);

/* In a forked child, which has submitted nothing. */
void aq_in_flight_forget(struct aq_in_flight *flight);

/* Wall-clock time that so much paid time takes who has that part. */
static inline int64_t aq_in_flight_stretch(int64_t paid_ns, uint32_t part_q16)
{
	return paid_ns * AQ_PART_ONE / part_q16;
}

/* In what steps to pay and to look for progress, so that both are fine beside what may be in flight. */
static inline int64_t aq_in_flight_step_ns(uint32_t part_q16)
{
	return AQ_IN_FLIGHT_NS / 4 * part_q16 / AQ_PART_ONE;
}

#endif
