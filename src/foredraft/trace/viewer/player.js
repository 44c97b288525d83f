"use strict";
/* The replay with its buttons, its keys and its words: one round is chosen, and all of them show it. */

class Player {
  /** onRound(index): a round was chosen, by hand or because it is played. */
  constructor(onRound = () => {}) {
    this.onRound = onRound;
    this.rounds = [];
    this.at = 0;
    this.words = new RoundView();
    const isStill = matchMedia("(prefers-reduced-motion: reduce)");
    this.replay = new Replay(Player.part("stage"), {
      onPhase: (name) => { Player.part("phase").textContent = name; },
      onRound: (index) => this.tell(index),
      onPlaying: (isPlaying) => this.tellPlaying(isPlaying),
      isStill: () => isStill.matches,
    });
    document.addEventListener("keydown", (event) => this.onKey(event));
    Player.part("play").addEventListener("click", () => this.replay.toggle());
    Player.part("step-on").addEventListener("click", () => this.replay.step(1));
    Player.part("step-back").addEventListener("click", () => this.replay.step(-1));
    Player.part("seek").addEventListener("input", () => this.choose(Player.part("seek").value - 1));
    Player.part("speed").addEventListener("change", () => { this.replay.speed = Number(Player.part("speed").value); });
  }

  static part(id) {
    return document.getElementById(id);
  }

  show(text) {
    this.rounds = text.rounds;
    this.words.show(text);
    this.replay.show(text);
    this.choose(0);
  }

  choose(index) {
    index = Math.max(0, Math.min(this.rounds.length - 1, index));
    this.replay.select(index);
    this.tell(index);
  }

  /** What a round looks like everywhere but in the replay. */
  tell(index) {
    this.at = index;
    this.count();
    this.words.select(index, this.replay.isPlaying);
    this.onRound(index);
  }

  /** Which round of how many. */
  count() {
    const seek = Player.part("seek");
    seek.max = Math.max(1, this.rounds.length);
    seek.value = this.at + 1;
    seek.setAttribute("aria-valuetext", `Round ${this.at + 1} of ${this.rounds.length}`);
    this.words.name(this.at);
  }

  /** Rounds were added at the end. */
  grow() {
    this.replay.grow();
    this.count();
  }

  /** The first rounds were taken away. */
  shift(count) {
    const at = this.at - count;
    if (at < 0) return this.choose(0);
    this.at = this.replay.index = at;
    return this.count();
  }

  tellPlaying(isPlaying) {
    Player.part("play").classList.toggle("playing", isPlaying);
    Player.part("play").querySelector("span").textContent = isPlaying ? "Pause" : "Play";
    this.words.select(this.at, isPlaying);
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const tag = event.target.tagName;
    if (["SELECT", "INPUT", "TEXTAREA"].includes(tag)) return;
    if (event.key === " " && ["BUTTON", "SUMMARY"].includes(tag)) return;
    const way = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === " ") this.replay.toggle();
    else if (way && event.shiftKey) { this.replay.pause(); this.choose(this.at + way); }
    else if (way) this.replay.step(way);
    else if (event.key === "Home") this.choose(0);
    else if (event.key === "End") this.choose(this.rounds.length - 1);
    else return;
    event.preventDefault();
  }
}
