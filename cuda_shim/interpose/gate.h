/* SPDX-License-Identifier: Apache-2.0 */
/* Wrappers of launches with more arguments than registers. They are in assembly (gate.S), which leaves the other arguments on the stack:
 * while aq_unpaced() is true they jump to the driver, otherwise to the paced form in submit.c. */
#ifndef AQ_INTERPOSE_GATE_H
#define AQ_INTERPOSE_GATE_H

#include "cuda_abi.h"

#define AQ_GATES(X) X(cuLaunchKernel) X(cuLaunchKernel_ptsz) X(cuLaunchCooperativeKernel) X(cuLaunchCooperativeKernel_ptsz)

#define AQ_GATE(name)                                                                                        \
	extern __typeof__(name) aq_paced_##name;                                                             \
	extern __typeof__(&name) aq_gate_##name; /* where it leads while launches are free: see lead_gate in submit.c */
AQ_GATES(AQ_GATE)
#undef AQ_GATE

#endif
