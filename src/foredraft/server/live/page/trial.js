"use strict";
/* The box in which a prompt is tried: a request like any other, and read to its end, for it ends with its reader. */

class Trial {
  /** stream: knows the key. shows(): whether the server shows texts; if not, the answer is shown here. */
  constructor(stream, shows, onSubmit) {
    const part = (id) => document.getElementById(id);
    this.stream = stream;
    this.shows = shows;
    this.onSubmit = onSubmit;
    this.form = part("trial");
    this.prompt = part("prompt-text");
    this.maxTokens = part("max-tokens");
    this.temperature = part("temperature");
    this.write = part("write");
    this.stop = part("stop");
    this.said = part("trial-said");
    this.answer = part("answer");
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    this.stop.addEventListener("click", () => this.control?.abort());
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
  }

  async run() {
    if (this.control) return;
    this.control = new AbortController();
    this.tell(true, "Waiting …");
    this.answer.hidden = this.shows();
    this.answer.textContent = "";
    try {
      this.tell(false, await this.request());
    } catch (error) {
      if (!(error instanceof TypeError || error.name === "AbortError")) throw error;
      this.tell(false, error.name === "AbortError" ? "Stopped." : "The server cannot be reached.");
    } finally {
      this.control = null;
      this.tell(false);
    }
  }

  /** -> what is to be said at the end */
  async request() {
    const prompt = this.prompt.value;
    const body = { prompt, max_tokens: Number(this.maxTokens.value), temperature: Number(this.temperature.value), stream: true };
    this.onSubmit(prompt);
    const answer = await fetch("v1/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json", ...this.stream.headers },
      body: JSON.stringify(body),
      signal: this.control.signal,
    });
    if (!answer.ok) return `Refused: ${await Stream.reason(answer)}`;
    this.tell(true, "Writing …");
    let said = "The stream ended early.";
    await Stream.lines(answer.body, (data) => {
      if (data === "[DONE]") return;
      const part = JSON.parse(data);
      if (part.error) said = `Failed: ${part.error.message}`;
      const choice = part.choices?.[0];
      if (!this.shows() && choice?.text) this.answer.append(Data.visible(choice.text));
      if (choice?.finish_reason) said = choice.finish_reason === "length" ? "Done: the requested number of tokens." : `Done: ${choice.finish_reason}.`;
    });
    return said;
  }

  tell(isBusy, said) {
    this.write.disabled = isBusy;
    this.stop.disabled = !isBusy;
    if (said !== undefined) this.said.textContent = said;
  }
}
