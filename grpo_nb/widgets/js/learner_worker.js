// The learner's worker: a policy and settings in, the policy one step later and a report out.

import { stepOf } from "./learner_step.js";

let start = null; // the weights that every run begins with, which are the reference

self.onmessage = ({ data }) => {
  if (data.start) {
    start = data.start;
    return self.postMessage({ ready: true });
  }
  const { policy, settings } = data;
  try {
    const report = stepOf(policy, start, settings);
    self.postMessage({ policy, report });
  } catch (error) {
    self.postMessage({ problem: error.message });
  }
};
