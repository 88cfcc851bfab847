// Search in pages that are opened as files: browsers start no worker there, so that the theme's
// worker runs in a frame instead.
if (location.protocol === "file:" && !window.searchesInFrame) {
  window.searchesInFrame = true;
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      inside.importScripts = (...scripts) => Promise.all(scripts.map((script) => this.load(script)));
      this.load(address).then(() => {
        this.ready = true;
        for (const data of this.waiting.splice(0)) this.postMessage(data);
      });
    }

    load(address) {
      return new Promise((done, failed) => {
        const script = this.frame.contentDocument.createElement("script");
        Object.assign(script, { src: new URL(address, document.baseURI), onload: done, onerror: failed });
        this.frame.contentDocument.body.append(script);
      });
    }

    postMessage(data) {
      if (!this.ready) return void this.waiting.push(data);
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
