/* Search runs in a Worker, which browsers refuse to a page that is opened from a folder. There, a hidden frame takes its place:
   the script runs in the frame, and messages go back and forth as events. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = (this.inside = frame.contentWindow);
      const load = (source) =>
        new Promise((done) => {
          const script = inside.document.createElement("script");
          script.src = source;
          script.onload = script.onerror = done;
          inside.document.body.append(script);
        });
      inside.document.open();
      inside.document.write("<html><body></body></html>");
      inside.document.close();
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      inside.importScripts = (...sources) =>
        sources.reduce((before, source) => before.then(() => load(source)), Promise.resolve());
      this.ready = load(new URL(url, location.href).href);
    }

    postMessage(data) {
      const { inside } = this;
      this.ready.then(() => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }

    terminate() {}
  };
  window.Worker = window.IFrameWorker;
}
