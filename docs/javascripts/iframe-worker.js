// A Worker within a hidden frame: browsers refuse workers to pages that are opened as files, and with
// them the site's search, which runs in one. The theme looks for the name IFrameWorker.
(function () {
  "use strict";
  if (location.protocol !== "file:") return;

  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inner = this.frame.contentWindow;
      this.inner = inner;
      // What a worker's script finds in its global scope.
      inner.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      inner.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(inner, source)), Promise.resolve());
      load(inner, String(url)).then(() => {
        this.ready = true;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
    }

    postMessage(data) {
      if (!this.ready) {
        this.waiting.push(data);
        return;
      }
      const event = new MessageEvent("message", { data });
      this.inner.dispatchEvent(event);
      if (this.inner.onmessage) this.inner.onmessage(event);
    }

    terminate() {
      this.frame.remove();
    }
  }

  function load(inner, source) {
    return new Promise((resolve, reject) => {
      const script = inner.document.createElement("script");
      script.src = source;
      script.onload = resolve;
      script.onerror = reject;
      inner.document.body.append(script);
    });
  }

  window.IFrameWorker = window.Worker = IFrameWorker;
})();
