/* SPDX-License-Identifier: Apache-2.0 */
/* state_internal.h - what state.c and process.c share. */
#ifndef ALIQUOT_SIM_STATE_INTERNAL_H
#define ALIQUOT_SIM_STATE_INTERNAL_H

#include "simulated_driver/state.h"

/* Descriptor of the mapped state file, for record locks. */
int sim_state_fd(void);

/* Make every domain's used_bytes the sum of what counts for it, after a holder of the mutex died. The caller holds the mutex. */
void sim_repair_locked(struct sim_state *state);

#endif
