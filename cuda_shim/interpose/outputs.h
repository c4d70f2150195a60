/* What the driver writes for the program in a call that may be refused after it succeeded: kept before the call, put back by the refusal.
 * The driver writes in place, so on success and on its own errors the program finds what the driver left, whatever that is. */
#ifndef AQ_INTERPOSE_OUTPUTS_H
#define AQ_INTERPOSE_OUTPUTS_H

#include <stdbool.h>
#include <stddef.h>

#define AQ_OUTPUTS_MAX 4

struct aq_outputs {
	unsigned count;
	struct {
		void *place;
		void *was;
		size_t bytes;
	} kept[AQ_OUTPUTS_MAX];
};

/* `place` may be NULL: then nothing is written there. False when there is no memory to keep it; the call must not be made then. */
bool aq_outputs_keep(struct aq_outputs *outputs, void *place, size_t bytes);
void aq_outputs_put_back(const struct aq_outputs *outputs);
/* Always, at the end. */
void aq_outputs_forget(struct aq_outputs *outputs);

#endif
