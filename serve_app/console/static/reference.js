// Shows the OpenAPI document that the page names, with the viewer that the gateway serves.
"use strict";

const viewer = document.createElement("script");
viewer.src = "/docs/swagger-ui-bundle.js";
viewer.addEventListener("load", () => {
  window.ui = SwaggerUIBundle({
    url: document.getElementById("docs").dataset.document,
    dom_id: "#docs",
    deepLinking: true,
    defaultModelsExpandDepth: 0,
    displayRequestDuration: true,
    validatorUrl: null,
  });
});
document.head.append(viewer);
