// Browsers start no workers for pages that are opened from a folder, and the search is one: an invisible frame stands
// for it there.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      this.scope = frame.contentWindow;
      this.scope.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }));
      this.ready = new Promise(loaded => {
        const script = this.scope.document.createElement("script");
        script.src = address;
        script.onload = loaded;
        this.scope.document.body.append(script);
      });
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
  window.Worker = window.IFrameWorker;
}
