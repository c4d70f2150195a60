/* SPDX-License-Identifier: Apache-2.0 */
#include "limit/control.h"

#define WHOLE_Q16 65536
#define FORFEITED 1 /* closed_at_ns of an ended process: all that it paid counts as used */
#define UNSEEN_NS 1000000ll /* so short a use may be in no figure: they are in whole percents of 100 ms */
#define GIVEN_BACK 32 /* the part of what was paid ahead that is given back at once */

void aq_control_interrupted(struct aq_bucket *bucket)
{
	if (atomic_load_explicit(&bucket->regime, memory_order_relaxed))
		atomic_store_explicit(&bucket->regime, 0, memory_order_relaxed);
}

bool aq_control_take_lease(struct aq_bucket *bucket, int64_t now_ns, bool is_held)
{
	int64_t until = atomic_load_explicit(&bucket->lease_until_ns, memory_order_relaxed);
	int64_t left = (int64_t)((uint64_t)until - (uint64_t)now_ns);

	/* Only a tenant writes a lease that is far in the future; it must not end the correction permanently. */
	if (left > (is_held ? 0 : AQ_CONTROL_PERIOD_NS - AQ_CONTROL_UNHELD_NS) && left <= AQ_CONTROL_PERIOD_NS)
		return false;
	return atomic_compare_exchange_strong_explicit(&bucket->lease_until_ns, &until, now_ns + AQ_CONTROL_PERIOD_NS, memory_order_relaxed,
						       memory_order_relaxed);
}

/* Do the figures still reflect a time without a ceiling? Then this is one less of them. */
static bool is_stale(struct aq_bucket *bucket, uint32_t percent, int64_t span_ns)
{
	uint32_t regime = atomic_load_explicit(&bucket->regime, memory_order_relaxed);
	uint32_t stale = regime & 0xff ? regime >> 8 : AQ_CONTROL_STALE;
	uint32_t periods = span_ns < 2 * AQ_CONTROL_PERIOD_NS ? 1 : AQ_CONTROL_STALE;

	if (stale > AQ_CONTROL_STALE)
		stale = AQ_CONTROL_STALE;
	atomic_store_explicit(&bucket->regime, (stale > periods ? stale - periods : 0) << 8 | percent, memory_order_relaxed);
	return stale > 0;
}

static int64_t difference(int64_t a, int64_t b)
{
	return (int64_t)((uint64_t)a - (uint64_t)b);
}

static bool is_sane(int64_t ns)
{
	return ns > AQ_BUCKET_FLOOR_NS && ns < -AQ_BUCKET_FLOOR_NS;
}

int64_t aq_control_compare(struct aq_compared *process, int64_t now_ns, int64_t paid_ns, int64_t measured_ns)
{
	int64_t seen = atomic_load_explicit(&process->seen_ns, memory_order_relaxed);
	int64_t due = atomic_load_explicit(&process->pending_ns, memory_order_relaxed);
	int64_t age = difference(now_ns, atomic_load_explicit(&process->closed_at_ns, memory_order_relaxed));
	int64_t recent = difference(paid_ns, seen);

	if (!is_sane(recent) || !is_sane(due))
		recent = due = 0;
	if (recent < 0) { /* it got more back than it paid */
		due += recent;
		recent = 0;
	}
	int64_t rest = measured_ns - due, covered = rest < 0 ? 0 : rest < recent ? rest : recent;
	bool closes = age < 0 || age >= AQ_CONTROL_LATE_NS;
	atomic_store_explicit(&process->seen_ns, closes ? paid_ns : paid_ns - (recent - covered), memory_order_relaxed);
	atomic_store_explicit(&process->pending_ns, closes ? recent - covered : rest < 0 ? -rest : 0, memory_order_relaxed);
	if (closes)
		atomic_store_explicit(&process->closed_at_ns, now_ns, memory_order_relaxed);
	return closes || rest > 0 ? rest - covered : 0;
}

int64_t aq_control_uncovered(const struct aq_compared *process, int64_t paid_ns)
{
	int64_t recent = difference(paid_ns, atomic_load_explicit(&process->seen_ns, memory_order_relaxed));
	int64_t due = atomic_load_explicit(&process->pending_ns, memory_order_relaxed);

	return is_sane(recent) && is_sane(due) && recent + due > 0 ? recent + due : 0;
}

void aq_control_conclude(struct aq_settlement *settlement, struct aq_compared *process, int64_t paid_ns)
{
	int64_t uncovered = aq_control_uncovered(process, paid_ns);

	atomic_store_explicit(&process->seen_ns, paid_ns, memory_order_relaxed);
	atomic_store_explicit(&process->pending_ns, 0, memory_order_relaxed);
	atomic_fetch_sub_explicit(&settlement->owed_ns, uncovered, memory_order_relaxed);
}

bool aq_control_end(struct aq_compared *process, int64_t paid_ns)
{
	int64_t uncovered = aq_control_uncovered(process, paid_ns);

	atomic_store_explicit(&process->seen_ns, 0, memory_order_relaxed);
	atomic_store_explicit(&process->pending_ns, uncovered, memory_order_relaxed);
	atomic_store_explicit(&process->closed_at_ns, 0, memory_order_relaxed);
	return uncovered > 0;
}

int64_t aq_control_compare_ended(struct aq_compared *process, int64_t measured_ns, int64_t rounding_ns)
{
	int64_t pending = aq_control_uncovered(process, 0), rest = pending - measured_ns, unrounded = rest - rounding_ns;

	if (atomic_load_explicit(&process->closed_at_ns, memory_order_relaxed) == FORFEITED)
		return 0;
	atomic_store_explicit(&process->pending_ns, unrounded > 0 ? unrounded : 0, memory_order_relaxed);
	return rest >= 0 ? 0 : rest < -AQ_SETTLE_ORPHAN_NS ? AQ_SETTLE_ORPHAN_NS : -rest;
}

void aq_control_forfeit(struct aq_compared *process)
{
	atomic_store_explicit(&process->closed_at_ns, FORFEITED, memory_order_relaxed);
}

bool aq_control_conclude_ended(struct aq_settlement *settlement, struct aq_compared *process, int64_t now_ns, int64_t ended_ago_ns,
			       bool may_be_unseen)
{
	int64_t ahead = aq_control_uncovered(process, 0) - (may_be_unseen ? UNSEEN_NS : 0);
	int64_t named_at = atomic_load_explicit(&settlement->ended_named_ns, memory_order_relaxed);
	bool is_named = named_at && difference(now_ns, named_at) >= 0 && difference(now_ns, named_at) < AQ_CONTROL_NAMED_NS;

	if (ended_ago_ns < AQ_CONTROL_ENDED_NS || !is_named ||
	    atomic_load_explicit(&process->closed_at_ns, memory_order_relaxed) == FORFEITED || !aq_control_uncovered(process, 0))
		return false;
	atomic_store_explicit(&process->pending_ns, 0, memory_order_relaxed);
	if (ahead > 0)
		atomic_fetch_sub_explicit(&settlement->owed_ns, ahead, memory_order_relaxed);
	return true;
}

static void begin_comparing(struct aq_compared *process, int64_t now_ns, int64_t paid_ns)
{
	atomic_store_explicit(&process->seen_ns, paid_ns, memory_order_relaxed);
	atomic_store_explicit(&process->pending_ns, 0, memory_order_relaxed);
	atomic_store_explicit(&process->closed_at_ns, now_ns, memory_order_relaxed);
}

/* Of the processes that have ended. A figure that does not count may have been of use that they paid for. */
static int64_t compare_ended(struct aq_settlement *settlement, const struct aq_measured *measured, bool counts)
{
	int64_t owed = 0, rounding_ns = 0;

	for (unsigned i = 0; i < measured->count; i++) {
		const struct aq_process_use *use = &measured->process[i];
		int64_t measured_ns = measured->span_ns * use->share_q16 / WHOLE_Q16;

		if (!use->has_ended)
			continue;
		if (use->share_q16)
			atomic_store_explicit(&settlement->ended_named_ns, measured->at_ns, memory_order_relaxed);
		if (!counts) {
			aq_control_forfeit(use->compared);
		} else if (measured_ns > 0) {
			owed += aq_control_compare_ended(use->compared, measured_ns, rounding_ns);
			rounding_ns = measured->span_ns / 100;
		}
	}
	return owed;
}

/* Of the living ones. A figure that does not count leaves nothing to compare the next one with. */
static int64_t compare_living(const struct aq_measured *measured, int64_t span_ns, bool counts)
{
	int64_t owed = 0;

	for (unsigned i = 0; i < measured->count; i++) {
		const struct aq_process_use *use = &measured->process[i];

		if (use->has_ended)
			continue;
		if (counts)
			owed += aq_control_compare(use->compared, measured->at_ns, use->paid_ns, span_ns * use->share_q16 / WHOLE_Q16);
		else
			begin_comparing(use->compared, measured->at_ns, use->paid_ns);
	}
	return owed;
}

void aq_control_settle(struct aq_bucket *bucket, struct aq_settlement *settlement, uint32_t percent, const struct aq_measured *measured)
{
	int64_t ahead = atomic_load_explicit(&settlement->owed_ns, memory_order_relaxed);
	bool is_first = measured->span_ns <= 0 || !is_sane(ahead) || percent == 0 || percent > 100;
	bool is_gap = measured->span_ns > AQ_CONTROL_GAP_NS;
	bool counts = !is_first && !is_stale(bucket, percent, measured->span_ns);
	int64_t owed = compare_living(measured, is_gap ? 2 * AQ_CONTROL_PERIOD_NS : measured->span_ns, counts) +
		       compare_ended(settlement, measured, counts && !is_gap);

	atomic_store_explicit(&settlement->seen_us, measured->until_us, memory_order_relaxed);
	if (ahead < 0) /* a debt was taken when it was found */
		owed += ahead;
	/* The first figure after a gap has nothing to be compared with. */
	if (!counts || !is_sane(owed) || (is_gap && owed < 0))
		owed = 0;
	atomic_store_explicit(&settlement->owed_ns, owed, memory_order_relaxed);
	if (owed > 0)
		aq_bucket_settle(bucket, owed);
}

static void give_back(struct aq_bucket *bucket, struct aq_settlement *settlement, int64_t parts)
{
	int64_t ahead = -atomic_load_explicit(&settlement->owed_ns, memory_order_relaxed);
	int64_t balance = atomic_load_explicit(&bucket->balance_ns, memory_order_relaxed), part = ahead / parts;

	if (part <= 0 || !is_sane(ahead) || balance >= 0)
		return;
	part = part < -balance ? part : -balance;
	atomic_fetch_add_explicit(&settlement->owed_ns, part, memory_order_relaxed);
	aq_bucket_settle(bucket, -part);
}

void aq_control_give_back(struct aq_bucket *bucket, struct aq_settlement *settlement)
{
	give_back(bucket, settlement, GIVEN_BACK);
}

void aq_control_give_all_back(struct aq_bucket *bucket, struct aq_settlement *settlement)
{
	give_back(bucket, settlement, 1);
}
