"use strict";
/* From samples of counts to figures over time: every figure is a ratio of differences between two samples. */

class Series {
  /** seconds: how far back samples are kept. */
  constructor(columns, seconds) {
    this.place = Object.fromEntries(columns.map((name, index) => [name, index]));
    this.seconds = seconds;
    this.samples = [];
  }

  add(samples) {
    for (const sample of samples) {
      if (!this.samples.length || this.time(sample) > this.time(this.last)) this.samples.push(sample);
    }
    const oldest = this.last ? this.time(this.last) - this.seconds : 0;
    // one before the window is kept, for what happened between it and the next
    while (this.samples.length > 2 && this.time(this.samples[1]) < oldest) this.samples.shift();
  }

  get last() {
    return this.samples[this.samples.length - 1];
  }

  time(sample) {
    return sample[this.place.time];
  }

  /** What was added to a count between two samples. */
  grown(name, from, until) {
    return until[this.place[name]] - from[this.place[name]];
  }

  /** The sample that was the last one so many seconds before another. */
  before(sample, seconds) {
    const wanted = this.time(sample) - seconds;
    let found = this.samples[0];
    for (const one of this.samples) {
      if (this.time(one) > wanted) break;
      found = one;
    }
    return found;
  }

  /** figure(from, until) over `smooth` seconds at each sample -> [{from, until, value}], value null where there is none. */
  line(figure, smooth) {
    return this.samples.slice(1).map((sample, index) => {
      const start = smooth ? this.before(sample, smooth) : this.samples[index];
      return { from: this.time(this.samples[index]), until: this.time(sample), value: figure(start, sample) };
    });
  }

  tokensPerSecond(from, until) {
    const seconds = this.time(until) - this.time(from);
    return seconds > 0 ? this.grown("num_emitted_tokens", from, until) / seconds : null;
  }

  ratio(part, whole, from, until) {
    const all = this.grown(whole, from, until);
    return all > 0 ? this.grown(part, from, until) / all : null;
  }

  /** α = accepted / evaluated. */
  alpha(from, until) {
    return this.ratio("num_accepted_tokens", "num_evaluated_tokens", from, until);
  }

  /** τ: tokens of a target pass with a draft, bonus included. */
  tau(from, until) {
    const accepted = this.ratio("num_accepted_tokens", "num_spec_steps", from, until);
    return accepted === null ? null : 1 + accepted;
  }

  /** Tokens of a target pass, those without a draft included. */
  tokensPerPass(from, until) {
    return this.ratio("num_emitted_tokens", "num_steps", from, until);
  }

  /** γ: draft tokens that the policy requested, per text and pass. */
  gamma(from, until) {
    return this.ratio("num_asked_tokens", "num_steps", from, until);
  }
}
