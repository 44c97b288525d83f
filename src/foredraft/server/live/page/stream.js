"use strict";
/* Reads server-sent events with fetch, which can carry a key; comes back by itself when the connection ends. */

class Stream {
  static SILENCE_MS = 15000;

  /** events: onFrame(object), onState(name, more): "live", "lost", "key", "full". */
  constructor(address, events) {
    this.address = address;
    this.events = events;
    this.key = null;
  }

  get headers() {
    return this.key === null ? {} : { Authorization: `Bearer ${this.key}` };
  }

  async run() {
    for (;;) {
      const pause = await this.connect();
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }

  /** A connection from its beginning to its end -> after how many milliseconds to try again. */
  async connect() {
    const control = new AbortController();
    let watch = setTimeout(() => control.abort(), Stream.SILENCE_MS);
    const alive = () => {
      clearTimeout(watch);
      watch = setTimeout(() => control.abort(), Stream.SILENCE_MS);
    };
    try {
      const answer = await fetch(this.address, { headers: this.headers, signal: control.signal, cache: "no-store" });
      if (answer.status === 401 || answer.status === 403) {
        clearTimeout(watch);
        await this.askForKey();
        return 0;
      }
      if (!answer.ok) {
        this.events.onState("full", await Stream.reason(answer));
        return 5000;
      }
      this.events.onState("live");
      await Stream.lines(answer.body, (data) => this.events.onFrame(JSON.parse(data)), alive);
    } catch (error) {
      if (!(error instanceof TypeError || error.name === "AbortError")) throw error;
    } finally {
      clearTimeout(watch);
      control.abort();
    }
    this.events.onState("lost");
    return 1000;
  }

  askForKey() {
    return new Promise((resolve) => {
      this.haveKey = (key) => { this.key = key; resolve(); };
      this.events.onState("key", this.key !== null);
    });
  }

  /** Why a request was refused, as an OpenAI-shaped body says it. */
  static async reason(answer) {
    const body = await answer.json().catch(() => null);
    return body?.error?.message ?? `the server answered ${answer.status}`;
  }

  /** Calls onData with the data of each event of a body, and onBytes whenever anything comes. */
  static async lines(body, onData, onBytes = () => {}) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      onBytes();
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) if (event.startsWith("data: ")) onData(event.slice(6));
    }
  }
}
