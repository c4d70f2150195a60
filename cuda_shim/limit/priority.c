#include "limit/priority.h"

void aq_priority_stamp(struct aq_priority_line *line, int64_t now_ns)
{
	/* Several containers may stamp at once; the later value wins often enough, and a microsecond earlier changes nothing. */
	atomic_store_explicit(&line->launched_at_ns, now_ns, memory_order_relaxed);
}

uint32_t aq_priority_percent(const struct aq_priority_line *line, int64_t now_ns, uint32_t percent)
{
	int64_t stamp = atomic_load_explicit(&line->launched_at_ns, memory_order_relaxed);
	int64_t age = (int64_t)((uint64_t)now_ns - (uint64_t)stamp);
	/* A stamp from the future by more than the window is nonsense; one from a moment ahead is another core's launch. */
	bool wanted = stamp != 0 && age < AQ_PRIORITY_FRESH_NS && age > -AQ_PRIORITY_FRESH_NS;
	if (!wanted)
		return percent;
	return percent && percent < AQ_PRIORITY_TRICKLE_PERCENT ? percent : AQ_PRIORITY_TRICKLE_PERCENT;
}
