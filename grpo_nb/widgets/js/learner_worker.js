// The learner's worker: a policy and settings in, the policy one step later and a report out.

import { stepOf } from "./learner_step.js";

let start = null; // the weights that every run begins with, which are the reference
const post = self.postMessage.bind(self); // a reward may change what `self` has

// Each answer has the number of its question: what a reward posts by itself has none.
self.onmessage = ({ data }) => {
  if (data.start) {
    start = data.start;
    return post({ ready: true });
  }
  const { policy, settings, id } = data;
  try {
    const report = stepOf(policy, start, settings);
    post({ id, policy, report });
  } catch (error) {
    post({ id, problem: error.message || String(error) });
  }
};
